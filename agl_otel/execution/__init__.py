"""How algorithm and runners of one Trainer are run together: in processes (client-server) or in threads (shared memory)."""

from __future__ import annotations

from agl_otel.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle, resolve_managed_store_flag
from agl_otel.execution.client_server import ClientServerExecutionStrategy
from agl_otel.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agl_otel.execution.shared_memory import SharedMemoryExecutionStrategy

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
