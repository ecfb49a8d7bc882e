"""0.3's `execution`: agl_otel.compat.execution."""

from __future__ import annotations

from agl_otel.compat.execution import (
    AlgorithmBundle,
    ClientServerExecutionStrategy,
    ExecutionEvent,
    ExecutionStrategy,
    MultiprocessingEvent,
    RunnerBundle,
    SharedMemoryExecutionStrategy,
    ThreadingEvent,
    resolve_managed_store_flag,
)

__all__ = [
    "AlgorithmBundle",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
    "resolve_managed_store_flag",
]
