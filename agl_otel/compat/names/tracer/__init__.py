"""0.3's `tracer`: agl_otel.compat.tracer."""

from __future__ import annotations

from agl_otel.compat import tracer
from agl_otel.compat.tracer import *  # noqa: F403 - the same names

__all__: list[str] = []
__all__ += tracer.__all__
