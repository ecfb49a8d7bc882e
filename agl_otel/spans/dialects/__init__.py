"""The dialects in which instrumentations write model calls: one file for each, and their registry.

docs/dialects.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agl_otel.spans.dialects import agl, gen_ai, gen_ai_events, langsmith, litellm, openinference, openllmetry, vercel, weave
from agl_otel.spans.dialects.dialect import Dialect

DIALECTS: Final[Sequence[Dialect]] = (
    agl.DIALECT,
    litellm.DIALECT,
    weave.DIALECT,
    vercel.DIALECT,
    openinference.DIALECT,
    langsmith.DIALECT,
    gen_ai.DIALECT,
    openllmetry.DIALECT,
    gen_ai_events.DIALECT,
)
"""The first that matches reads the span: unambiguous marks first, OpenTelemetry's general conventions last."""
