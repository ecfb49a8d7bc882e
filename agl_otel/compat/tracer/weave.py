"""0.3's `tracer.weave`: agl_otel.tracer."""

from __future__ import annotations

from agl_otel.tracer import WeaveTracer

__all__ = ["WeaveTracer"]
