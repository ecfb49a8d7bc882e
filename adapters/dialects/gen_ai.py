"""OpenTelemetry's semantic conventions for generative AI.

Until 1.36 messages are events (of the span, or log records), from 1.37 on JSON attributes (of the span, or of one event: events.py).
OpenLLMetry writes attributes since 0.50, and so do openai-agents under it and most newer libraries.
"""

from __future__ import annotations

from agl_otel.adapters.dialects.readers import from_events, from_parts
from agl_otel.adapters.dialects.table import ABSENT, ANY, Dialect

OPERATIONS = ("chat", "text_completion", "generate_content")

MESSAGES = Dialect(
    name="gen_ai",
    written_by="OpenTelemetry 1.37+, OpenLLMetry 0.50+, openai-agents, pydantic-ai 2, most newer libraries",
    call=(
        {"gen_ai.operation.name": OPERATIONS, "gen_ai.input.messages": ANY},
        {"gen_ai.operation.name": OPERATIONS, "gen_ai.output.messages": ANY},
        {"gen_ai.operation.name": (ABSENT,), "gen_ai.input.messages": ANY},
        {"gen_ai.operation.name": (ABSENT,), "gen_ai.output.messages": ANY},
    ),
    read=from_parts,
)
EVENTS = Dialect(
    name="gen_ai_events",
    written_by="OpenTelemetry up to 1.36, and any call whose messages are not captured",
    call=({"gen_ai.operation.name": OPERATIONS},),
    read=from_events,
)
