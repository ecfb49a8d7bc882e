"""Convert spans and columns to training samples. Pure.

On columns (algorithms): to_trajectories. On lists of spans, with Agent Lightning 0.3's names: TraceToMessages, TracerTraceToTriplet,
LlmProxyTraceToTriplet. agl_otel/spans/dialects decodes the model calls of each instrumentation.
"""

from __future__ import annotations

from agl_otel.adapters.base import Adapter, OtelTraceAdapter, TraceAdapter, TraceToTripletBase
from agl_otel.adapters.lengths import limit_lengths
from agl_otel.adapters.messages import TraceToMessages, to_messages
from agl_otel.adapters.records import FORMS, Reading, Rows, rows_of, to_transitions
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories
from agl_otel.adapters.tree import RewardMatchPolicy, TraceTree
from agl_otel.adapters.triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet

__all__ = [
    "FORMS",
    "Adapter",
    "LlmProxyTraceToTriplet",
    "OtelTraceAdapter",
    "Reading",
    "RewardMatchPolicy",
    "Rows",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
    "TrajectoryBatch",
    "limit_lengths",
    "to_messages",
    "rows_of",
    "to_trajectories",
    "to_transitions",
]
