"""The interface between the runner and its agents: one Job for each attempt, and the Agent protocols.

An agent raises AgentError (or any other exception) when the attempt failed; returning means success. The runner ends an agent by
cancelling its task; the agent has ended when the task is done. Rewards are emitted in the runner's process, before the attempt is sealed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from opentelemetry.sdk.trace import ReadableSpan

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner.environment import Addresses
from agl_otel.runner.ledgers import Ledgers
from agl_otel.runner.output import Capture
from agl_otel.runner.threads import call
from agl_otel.types import Answered, AttemptedRollout, LedgerReach, NamedResources
from agl_otel_hook import attempt_scope, conventions
from agl_otel_hook.emit import emit_reward
from agl_otel_hook.emit.emitters import as_number

Reward = float | Mapping[str, float]
Grader = Callable[[Any, Any], Reward | Awaitable[Reward | None] | None]
"""(task, answer) → reward. A dict holds several dimensions, the first of them primary. None: no reward."""
PRIMARY: Final = "primary"


@dataclass(slots=True)
class Job:
    """One attempt to run."""

    rollout: AttemptedRollout
    resources: NamedResources
    """In the version that the rollout names."""
    addresses: Addresses
    traceparent: str
    """Of the attempt's root span."""
    token: str = field(default="", repr=False)
    """The stack's bearer token; empty: none."""
    ledgers: Ledgers | None = field(default=None, repr=False)
    """Where the attempt's processes record their span counts; None: nowhere."""
    answered: dict[str, Answered] = field(default_factory=dict[str, Answered])
    """{process marker: span counts from its HTTP response}."""
    over: float | None = None
    """When the agent had ended or answered (Unix seconds); None before."""
    works: str = "the agent"
    """Who runs: the agent, then the grader by its name."""
    captures: list[Capture] = field(default_factory=list[Capture])
    """Output of the attempt, filled while it runs and therefore available however it ends."""

    returned: list[ReadableSpan] = field(default_factory=list[ReadableSpan])
    """Spans that the agent handed over because something else has recorded them."""

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
    """Runs attempts, many at once."""

    instrument: tuple[str, ...]
    """Names of instrumentors to load in the runner's process; empty for agents with processes of their own."""

    def prepare(self, addresses: Addresses) -> None:
        """Prepare for attempts; called before the first one and whenever the stack's addresses change."""
        ...

    def check(self, task: Any) -> None:
        """Raise UsageError for a task that this agent can never run, for example for lack of a key."""
        ...

    async def run(self, job: Job) -> None:
        """Run the attempt. Raises AgentError where it failed."""
        ...


@runtime_checkable
class HookedAgent(Protocol):
    """An agent that declares whether its processes run under agl-otel's hook."""

    hooked: bool
    """True: the attempt's processes count their spans, so the verdict treats missing counts as an error."""


@runtime_checkable
class RecordedAgent(Protocol):
    """An agent whose attempts are processes that the runner starts. Processes of other agents keep no ledger on this machine."""

    @property
    def reach(self) -> LedgerReach:
        """Whether the processes run under the hook, or on other machines."""
        ...

    @property
    def description(self) -> str:
        """The command, for display."""
        ...


@runtime_checkable
class ClosingAgent(Protocol):
    """An agent that holds resources beyond single attempts."""

    async def close(self) -> None:
        """Release the resources; called when the runner ends."""
        ...


def as_reward(value: Any) -> dict[str, float] | None:
    """Return a number (`as_number`), or a non-empty dict of numbers, as a reward, {dimension: number}; None for anything else.

    An int beyond the range of floats becomes infinite.
    """
    given = {name: as_number(each) for name, each in value.items()} if isinstance(value, Mapping) else {PRIMARY: as_number(value)}
    found = {name: _float(number) for name, number in given.items() if isinstance(name, str) and number is not None}
    return found if found and len(found) == len(given) else None


async def reward(job: Job, rewards: Mapping[str, float]) -> None:
    """Emit the attempt's reward, as `as_reward` returns it. Raises AgentError for numbers that are not finite; they are never repaired."""
    if bad := [f"{name}={number}" for name, number in rewards.items() if not math.isfinite(number)]:
        raise AgentError(f"a reward must be finite, got {', '.join(bad)}")
    with attempt_scope(job.rollout_id, job.attempt_id, traceparent=job.traceparent):
        emit_reward(rewards, primary_key=next(iter(rewards)), attributes={conventions.REWARD_GIVEN: True})


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_grader(grader: Grader) -> None:
    """Raise UsageError where the grader cannot be called as `grade` does, with (task, answer)."""
    name = getattr(grader, "__qualname__", repr(grader))
    check_returns(grader)
    try:
        inspect.signature(grader).bind("task", "answer")
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise UsageError(
            f"grader {name}{inspect.signature(grader)} is called with (task, answer): {error}; let it take these two"
        ) from None


def check_returns(function: Callable[..., Any]) -> None:
    """Raise UsageError for a generator, sync or async, and for a class, which return no value of their own."""
    if inspect.isclass(function):
        raise UsageError(f"{function.__qualname__} is a class, and calling it only makes one: name a function, or an object that is called")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            f"{getattr(function, '__qualname__', function)} is a generator, and its value is needed: return it, without `yield`"
        )


async def grade(job: Job, grader: Grader, answer: Any) -> None:
    """Call the user's grader with `answer` and emit its reward. Raises AgentError where the grader raises or returns no reward."""
    job.works = f"grader {getattr(grader, '__qualname__', repr(grader))}"
    try:
        value = await call(grader, job.rollout.input, answer)
    except Exception as error:  # user code: any exception fails this attempt only
        raise AgentError(f"{job.works} raised {type(error).__name__}: {error}") from error
    if value is None:
        return
    try:
        if (found := as_reward(value)) is None:
            raise AgentError(f"{value!r:.200} is not a reward: give a number, a dict of numbers, or None")
        await reward(job, found)
    except AgentError as error:
        raise AgentError(f"{job.works}: {error}") from None
