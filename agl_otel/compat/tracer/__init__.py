"""0.3's tracers, which record spans in a plain `python script.py`.

process.py sets the process up once (SDK, instrumentations, ids and seals); tracer.py has the base class for users to subclass; otel.py
and dummy.py have the tracers of Agent Lightning 0.3. An agent that runs under `opentelemetry-instrument` needs none of this.
"""

from __future__ import annotations

from agl_otel.compat.tracer.dummy import DummyTracer
from agl_otel.compat.tracer.otel import AgentOpsTracer, OtelTracer, WeaveTracer
from agl_otel.compat.tracer.process import ProcessTelemetry, Route, process_telemetry
from agl_otel.compat.tracer.tracer import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer

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
