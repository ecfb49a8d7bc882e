"""0.3's `tracer.agentops`: agl_otel.compat.tracer."""

from __future__ import annotations

from agl_otel.compat.tracer import AgentOpsTracer

__all__ = ["AgentOpsTracer"]
