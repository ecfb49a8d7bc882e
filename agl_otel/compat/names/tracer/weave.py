"""0.3's `tracer.weave`: agl_otel.compat.tracer."""

from __future__ import annotations

from agl_otel.compat.tracer import WeaveTracer

__all__ = ["WeaveTracer"]
