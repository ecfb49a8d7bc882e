"""What a runner gives to an agent and gets back: one attempt, whichever kind of agent runs it.

An agent raises AgentError (or anything else) where the attempt failed; returning means that it succeeded. It is ended by cancelling
its task, and has then ended when the task has. Rewards are emitted here, in the runner's process, before the attempt is sealed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

from agl_otel.errors import AgentError
from agl_otel.runner.environment import Addresses
from agl_otel.runner.ledgers import Ledgers
from agl_otel.runner.output import Capture
from agl_otel.runner.threads import call
from agl_otel.types import Answered, AttemptedRollout, LedgerReach, NamedResources
from agl_otel_hook import attempt_scope, conventions
from agl_otel_hook.emit import emit_reward

Reward = float | Mapping[str, float]
Grader = Callable[[Any, Any], Reward | Awaitable[Reward | None] | None]
"""(task, answer) → reward; a dict is several dimensions, of which the first is the primary one. None: no reward."""
PRIMARY: Final = "primary"


@dataclass(slots=True)
class Job:
    """One attempt to run."""

    rollout: AttemptedRollout
    resources: NamedResources
    """The rollout's own version, as the queue has it."""
    addresses: Addresses
    traceparent: str
    """Of the attempt's root span."""
    token: str = field(default="", repr=False)
    """What the collector asks for; empty: nothing."""
    ledgers: Ledgers | None = field(default=None, repr=False)
    """Where the processes of the attempt count; None: nowhere."""
    answered: dict[str, Answered] = field(default_factory=dict[str, Answered])
    """{process marker: what it said} of processes that answered by HTTP."""
    over: float | None = None
    """When its agent had ended or answered (Unix seconds); None before."""
    captures: list[Capture] = field(default_factory=list[Capture])
    """What its process prints; filled while it runs, so that it is there however the attempt ends."""

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.rollout.rollout_id

    @property
    def attempt_id(self) -> str:
        """The attempt's id."""
        return self.rollout.attempt.attempt_id

    @property
    def key(self) -> tuple[str, str]:
        """(rollout id, attempt id)."""
        return self.rollout_id, self.attempt_id


@runtime_checkable
class Agent(Protocol):
    """Something that can run attempts, many at once."""

    instrument: tuple[str, ...]
    """Instrumentors that the runner's own process needs for it (empty where the agent has a process of its own)."""

    def prepare(self, addresses: Addresses) -> None:
        """Called before the first attempt, and again when the stack has moved."""
        ...

    def check(self, task: Any) -> None:
        """Raise UsageError where `task` cannot be run, whatever the model answers."""
        ...

    async def run(self, job: Job) -> None:
        """Run the attempt. Raises AgentError where it failed."""
        ...


@runtime_checkable
class HookedAgent(Protocol):
    """An agent that knows whether its processes run under our hook; of any other it is not known."""

    hooked: bool
    """Told to the reader: spans that nobody counted are an alarm then."""


@runtime_checkable
class RecordedAgent(Protocol):
    """An agent whose attempts are processes that the runner starts; those of any other keep no ledger on this machine."""

    @property
    def reach(self) -> LedgerReach:
        """Whether they run under our hook."""
        ...

    @property
    def shown(self) -> str:
        """What is started, for a person."""
        ...


@runtime_checkable
class ClosingAgent(Protocol):
    """An agent that keeps something for its runs, which is ended with the runner."""

    async def close(self) -> None:
        """End it."""
        ...


def is_reward(value: Any) -> TypeGuard[Reward]:
    """Whether `value` has the form of a reward: a number, or a dict of numbers that is not empty."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(key, str) and isinstance(v, (int, float)) for key, v in value.items())
    return isinstance(value, (int, float))


async def reward(job: Job, value: Any) -> None:
    """Emit `value` as the attempt's reward. Raises AgentError where it is none: a reward is never invented or repaired."""
    if not is_reward(value):
        raise AgentError(f"{value!r:.200} is no reward: give a number, a dict of numbers, or None")
    dimensions = value if isinstance(value, Mapping) else {PRIMARY: value}
    rewards = {name: _float(number) for name, number in dimensions.items()}
    if bad := [f"{name}={number}" for name, number in rewards.items() if not math.isfinite(number)]:
        raise AgentError(f"a reward must be finite, got {', '.join(bad)}")
    with attempt_scope(job.rollout_id, job.attempt_id, traceparent=job.traceparent):
        emit_reward(rewards, primary_key=next(iter(rewards)), attributes={conventions.REWARD_GIVEN: True})


def _float(number: float) -> float:
    """Infinite where an int is beyond what a float holds."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


async def grade(job: Job, grader: Grader, answer: Any) -> None:
    """Have the user's grader grade `answer` and emit what it says. Raises AgentError that says what went wrong in it."""
    name = getattr(grader, "__qualname__", repr(grader))
    try:
        value = await call(grader, job.rollout.input, answer)
    except Exception as error:  # the user's code: whatever it raises is data about this attempt
        raise AgentError(f"grader {name} raised {type(error).__name__}: {error}") from error
    if value is None:
        return
    try:
        await reward(job, value)
    except AgentError as error:
        raise AgentError(f"grader {name}: {error}") from None
