"""0.3's `tracer.agentops`: agl_otel.tracer."""

from __future__ import annotations

from agl_otel.tracer import AgentOpsTracer

__all__ = ["AgentOpsTracer"]
