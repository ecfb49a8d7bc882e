"""What every strategy is: something that runs an algorithm and some runners over one store until the algorithm is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agl_otel.compat.env_var import LightningEnvVar, resolve_bool_env_var
from agl_otel.compat.execution.events import ExecutionEvent
from agl_otel.store import Store

AlgorithmBundle = Callable[[Store, ExecutionEvent], Awaitable[None]]
"""Runs the algorithm; the runners stop when it returns."""
RunnerBundle = Callable[[Store, int, ExecutionEvent], Awaitable[None]]
"""Runs one runner (store, its number, when to stop)."""


class ExecutionStrategy:
    """Base of strategies."""

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: Store) -> None:
        """Run both until the algorithm is done, or until told to stop. Errors of either are raised."""
        raise NotImplementedError(f"{type(self).__name__} gives no execute")


def resolve_managed_store_flag(value: bool | None) -> bool:
    """Whether the strategy looks after the store: what is given, else AGL_MANAGED_STORE, else yes."""
    return resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, override=value, fallback=True)
