"""What agents, hooks and data sets look like to the runner, and what an agent may hand back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, Field

from agl_otel.types.rollouts import Rollout
from agl_otel.types.spans import SpanLike

T_co = TypeVar("T_co", covariant=True)
RolloutRawResult = float | Sequence[SpanLike] | None
"""What an agent returns: nothing (its spans say it all), the final reward, or spans of its own making."""


class Triplet(BaseModel):
    """One turn of a trajectory."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class Dataset(Protocol[T_co]):
    """Tasks by position: a list is one, and so is a data set of torch."""

    def __getitem__(self, index: int, /) -> T_co:
        """The task at `index`."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


class ParallelWorkerBase:
    """Something that is set up once (`init`), runs in several workers (`init_worker`, `run`, `teardown_worker`), and is taken down."""

    def __init__(self) -> None:
        self.worker_id: int | None = None
        """Which worker this is; None in the main process."""

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Set up what the workers share."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Set up one worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of one worker."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Take one worker down."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Take down what the workers shared."""


class Hook(ParallelWorkerBase):
    """What a user adds around a rollout: subclass it and override what is needed."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout) -> None:
        """After the trace was opened, before the agent runs."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout) -> None:
        """After the agent ran, before the trace is closed."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Rollout) -> None:
        """Before an attempt begins."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Rollout, spans: Sequence[SpanLike]) -> None:
        """After an attempt ended; `spans` are those of the attempt."""
