"""Base of execution strategies, which run an algorithm and its runners over one store until the algorithm ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agl_otel.compat.env_var import LightningEnvVar, resolve_bool_env_var
from agl_otel.compat.execution.events import ExecutionEvent
from agl_otel.compat.stores import LightningStore

AlgorithmBundle = Callable[[LightningStore, ExecutionEvent], Awaitable[None]]
"""Runs the algorithm; the runners stop when it returns."""
RunnerBundle = Callable[[LightningStore, int, ExecutionEvent], Awaitable[None]]
"""Runs one runner: (store, worker number, stop event)."""


class ExecutionStrategy:
    """Base of strategies."""

    runs_both = False
    """Whether `execute` runs the algorithm and its runners; these then take no rollouts of other runs."""

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run both until the algorithm ends or is interrupted. Raises the errors of either."""
        raise NotImplementedError(f"{type(self).__name__} gives no execute")


def resolve_managed_store_flag(value: bool | None) -> bool:
    """Return whether the strategy serves the store: `value`, else AGL_MANAGED_STORE, else True."""
    return resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, override=value, fallback=True)
