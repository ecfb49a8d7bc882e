"""Strategies that run a Trainer's algorithm and runners together: in processes (client-server) or in threads (shared memory)."""

from __future__ import annotations

from agl_otel.compat.execution.client_server import ClientServerExecutionStrategy
from agl_otel.compat.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agl_otel.compat.execution.shared_memory import SharedMemoryExecutionStrategy
from agl_otel.compat.execution.strategy import AlgorithmBundle, ExecutionStrategy, RunnerBundle, resolve_managed_store_flag

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
