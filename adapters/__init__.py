"""Adapters: what was observed in, training samples out. Pure functions on columns and spans; no I/O."""

from __future__ import annotations

from agl_otel.adapters.base import Adapter, OtelTraceAdapter, TraceAdapter, TraceToMessages
from agl_otel.adapters.messages import to_messages
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.adapters.tree import TraceTree
from agl_otel.adapters.triplets import LlmProxyTraceToTriplet, RewardMatchPolicy, TracerTraceToTriplet, TraceToTripletBase

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
    "TrajectoryBatch",
    "to_messages",
    "to_trajectories",
]
