"""The interfaces of agents, hooks and data sets to the runner, and the result types of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, Field

from agl_otel.types.rollouts import Rollout
from agl_otel.types.spans import SpanLike

T_co = TypeVar("T_co", covariant=True)
RolloutRawResult = float | Sequence[SpanLike] | None
"""An agent's result: None (its spans are enough), the final reward, or spans that it made itself."""


class Triplet(BaseModel):
    """One turn of a trajectory."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class Dataset(Protocol[T_co]):
    """Tasks by position, such as a list or a torch data set."""

    def __getitem__(self, index: int, /) -> T_co:
        """Return the task at `index`."""
        ...

    def __len__(self) -> int:
        """Return the number of tasks."""
        ...


class ParallelWorkerBase:
    """Base of what is set up once (`init`), runs in several workers (`init_worker`, `run`, `teardown_worker`), and is torn down."""

    def __init__(self) -> None:
        self.worker_id: int | None = None
        """The worker's number; None in the main process."""

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Set up the workers' shared state."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Set up one worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of one worker."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Tear down one worker."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Tear down the shared state."""


class Hook(ParallelWorkerBase):
    """Callbacks around a rollout: subclass it and override those that you need."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout) -> None:
        """Called after the trace was opened, before the agent runs."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout) -> None:
        """Called after the agent ran, before the trace is closed."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Rollout) -> None:
        """Called before an attempt begins."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Rollout, spans: Sequence[SpanLike]) -> None:
        """Called after an attempt ended; `spans` are the attempt's."""
