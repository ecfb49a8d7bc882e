"""LitAgent: what a runner calls for each rollout. The agent's own state, and how it is run, do not belong here."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agl_otel.types import AttemptedRollout, NamedResources, Rollout, RolloutRawResult

if TYPE_CHECKING:
    from agl_otel.compat.tracer import Tracer

T = TypeVar("T")
TRAIN = "train"


class LitAgent(Generic[T]):
    """An agent: override `rollout` (sync) or `rollout_async`; the `training_` and `validation_` forms where the two differ.

    Args:
        trained_agents: which of several agents are trained; kept for algorithms that ask (None: all).
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents
        self._trainer: Callable[[], Any] = lambda: None
        self._runner: Callable[[], Any] = lambda: None

    def is_async(self) -> bool:
        """Whether one of the `*_async` methods is overridden."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    # --- who runs it

    def set_trainer(self, trainer: Any) -> None:
        """Tell the agent whose it is; kept as a weak reference."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer. Raises ValueError where there is none."""
        return _known(self._trainer(), "trainer")

    trainer = property(get_trainer, doc="The trainer. Raises ValueError where there is none.")

    def set_runner(self, runner: Any) -> None:
        """Tell the agent who runs it; kept as a weak reference."""
        self._runner = weakref.ref(runner)

    def get_runner(self) -> Any:
        """The runner. Raises ValueError where there is none."""
        return _known(self._runner(), "runner")

    runner = property(get_runner, doc="The runner. Raises ValueError where there is none.")

    def get_tracer(self) -> Tracer:
        """The runner's tracer. Raises ValueError where there is no runner."""
        return self.get_runner().tracer

    tracer = property(get_tracer, doc="The runner's tracer. Raises ValueError where there is no runner.")

    # --- what it does

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do the task; what comes back is None, the reward, or spans."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout: override rollout or rollout_async")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do the task, without blocking the event loop."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout_async: override rollout or rollout_async")

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """`rollout` for rollouts of mode train."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """`rollout` for rollouts of any other mode."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """`rollout_async` for rollouts of mode train."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """`rollout_async` for rollouts of any other mode."""
        return await self.rollout_async(task, resources, rollout)

    def method_for(self, rollout: AttemptedRollout) -> Callable[..., Any]:
        """Which of its methods runs this rollout."""
        return getattr(
            self, ("training" if rollout.mode == TRAIN else "validation") + ("_rollout_async" if self.is_async() else "_rollout")
        )


def is_v0_1_rollout_api(function: Callable[..., Any]) -> bool:
    """Whether a method has the form of 0.1, whose second parameter was the rollout's id."""
    names = list(inspect.signature(function).parameters)
    return "rollout_id" in names[:3]


def _known(found: Any, what: str) -> Any:
    if found is None:
        raise ValueError(f"the agent has no {what}: it is set while one runs it")
    return found
