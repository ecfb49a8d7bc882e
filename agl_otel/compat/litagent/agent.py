"""LitAgent, the interface between a runner and an agent. How agents are run does not belong here."""

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
    """Base of agents. Override `rollout` (sync) or `rollout_async`; the `training_` and `validation_` forms if the two differ.

    Args:
        trained_agents: names the agents to train, for algorithms that read it; None: all.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents
        self._trainer: Callable[[], Any] = lambda: None
        self._runner: Callable[[], Any] = lambda: None

    def is_async(self) -> bool:
        """Return whether one of the `*_async` methods is overridden."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    # --- trainer and runner

    def set_trainer(self, trainer: Any) -> None:
        """Set the agent's trainer; a weak reference is kept."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer. Raises ValueError if there is none."""
        return _require(self._trainer(), "trainer")

    trainer = property(get_trainer, doc="The trainer. Raises ValueError if there is none.")

    def set_runner(self, runner: Any) -> None:
        """Set the agent's runner; a weak reference is kept."""
        self._runner = weakref.ref(runner)

    def get_runner(self) -> Any:
        """Return the runner. Raises ValueError if there is none."""
        return _require(self._runner(), "runner")

    runner = property(get_runner, doc="The runner. Raises ValueError if there is none.")

    def get_tracer(self) -> Tracer:
        """Return the runner's tracer. Raises ValueError if there is no runner."""
        return self.get_runner().tracer

    tracer = property(get_tracer, doc="The runner's tracer. Raises ValueError if there is no runner.")

    # --- the methods to override

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do the task; return None, the reward, or spans."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout: override rollout or rollout_async")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do the task without blocking the event loop; return None, the reward, or spans."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout_async: override rollout or rollout_async")

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run a rollout of mode train; the default calls `rollout`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run a rollout of any other mode; the default calls `rollout`."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run a rollout of mode train; the default calls `rollout_async`."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run a rollout of any other mode; the default calls `rollout_async`."""
        return await self.rollout_async(task, resources, rollout)

    def method_for(self, rollout: AttemptedRollout) -> Callable[..., Any]:
        """Return the method that runs this rollout."""
        return getattr(
            self, ("training" if rollout.mode == TRAIN else "validation") + ("_rollout_async" if self.is_async() else "_rollout")
        )


def is_v0_1_rollout_api(function: Callable[..., Any]) -> bool:
    """Return whether a method has the signature of 0.1, whose second parameter was the rollout's id."""
    names = list(inspect.signature(function).parameters)
    return "rollout_id" in names[:3]


def _require(found: Any, what: str) -> Any:
    if found is None:
        raise ValueError(f"the agent has no {what}: it is set only while the agent is run by one")
    return found
