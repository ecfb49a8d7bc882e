# What __init__.py loads when it is first used.
from .base import (
    Adapter,
    OtelTraceAdapter,
    TraceAdapter,
    TraceToTripletBase,
)
from .lengths import limit_lengths
from .messages import TraceToMessages, to_messages
from .records import FORMS, Reading, Rows, rows_of, to_transitions
from .trajectories import TrajectoryBatch, to_trajectories
from .tree import RewardMatchPolicy, TraceTree
from .triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet

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
