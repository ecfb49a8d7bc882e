"""0.3's `tracer`: agl_otel.compat.tracer."""

from __future__ import annotations

from agl_otel.compat.tracer import (
    AgentOpsTracer,
    DummyTracer,
    OtelTracer,
    ProcessTelemetry,
    Route,
    Tracer,
    WeaveTracer,
    clear_active_tracer,
    get_active_tracer,
    process_telemetry,
    set_active_tracer,
)

__all__ = [
    "AgentOpsTracer",
    "DummyTracer",
    "OtelTracer",
    "ProcessTelemetry",
    "Route",
    "Tracer",
    "WeaveTracer",
    "clear_active_tracer",
    "get_active_tracer",
    "process_telemetry",
    "set_active_tracer",
]
