"""0.3's `adapter`: agl_otel.adapters."""

from __future__ import annotations

from agl_otel.adapters import (
    Adapter,
    LlmProxyTraceToTriplet,
    OtelTraceAdapter,
    RewardMatchPolicy,
    TraceAdapter,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTripletBase,
    TraceTree,
)

__all__ = [
    "Adapter",
    "LlmProxyTraceToTriplet",
    "OtelTraceAdapter",
    "RewardMatchPolicy",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
]
