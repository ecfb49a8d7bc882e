"""One attempt while its agent runs: its time limit, being told to end, and what came of it.

Whoever wants it to end (the queue, the clock, a stop) says so to the `Run`; the agent's task is cancelled and waited for, because a
command's processes are gone only then. One that does not heed that is abandoned: it keeps nothing from going on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final, Literal

from agl_otel.errors import AglError
from agl_otel.runner.completion import Ended
from agl_otel.runner.job import Agent, Job
from agl_otel.types import AttemptedRollout

ABANDON_SECONDS: Final = 20.0  # longer than a command takes from SIGTERM to SIGKILL and its last output
Why = Literal["cancelled", "stopped", "timeout"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerEvent:
    """Something that a person who watches a runner wants to know."""

    kind: Literal["started", "ended"]
    rollout_id: str
    attempt_id: str
    outcome: str = ""
    """succeeded, failed, timeout or cancelled, once it has ended."""
    error: str | None = None
    seconds: float = 0.0
    """How long the agent ran."""
    spans: int | None = None
    """How many spans were made for it; None where its agent's processes are not counted here."""
    reward: float | None = None
    """The last primary reward that this process emitted for it."""


@dataclass(slots=True)
class Run:
    """One claimed attempt, until its agent has ended."""

    rollout: AttemptedRollout
    most_seconds: float | None = None
    """The runner's own limit, beside the rollout's."""
    why: Why | None = None
    """Who ended it, where it was ended."""
    abandoned: bool = False
    claimed_at: float = field(default_factory=time.monotonic)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def limit_seconds(self) -> float | None:
        """How long it may take; None: for ever."""
        return min((limit for limit in (self.rollout.config.timeout_seconds, self.most_seconds) if limit is not None), default=None)

    def end(self, why: Why) -> None:
        """Have it end. The first to say so is the reason."""
        self.why = self.why or why
        self._told.set()

    async def supervise(self, agent: Agent, job: Job) -> Ended:
        """Run the agent to its end. Never raises but when cancelled, and then the agent has ended too."""
        if self.why is not None:  # before it began
            return self._ended(job, None, 0.0)
        began = time.monotonic()
        limit = self.limit_seconds
        task = asyncio.create_task(agent.run(job))
        told = asyncio.create_task(self._told.wait())
        try:
            left = None if limit is None else max(0.0, limit - (began - self.claimed_at))
            done, _ = await asyncio.wait({task, told}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.end("timeout")
        finally:
            told.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=ABANDON_SECONDS)
                self.abandoned = not task.done()
        return self._ended(job, task, time.monotonic() - began)

    def _ended(self, job: Job, task: asyncio.Task[None] | None, seconds: float) -> Ended:
        error = _error_of(task) if task is not None and task.done() else None
        match self.why:
            case "cancelled":
                return Ended(job, "failed", "the queue ended the attempt", report=False, seconds=seconds)
            case "timeout":
                return Ended(job, "timeout", f"the agent ran past its {self.limit_seconds:g} s", seconds=seconds)
            case "stopped" if task is None or task.cancelled() or not task.done():
                return Ended(job, "failed", "the runner was stopped before the agent had ended", seconds=seconds)
            case _:
                return Ended(job, "failed" if error else "succeeded", error, seconds=seconds)


def outcome_of(ended: Ended) -> str:
    """The word for how it ended: its status, or cancelled."""
    return ended.status if ended.report else "cancelled"


def _error_of(task: asyncio.Task[None]) -> str | None:
    """Why the agent's task failed, in words; None where it did not."""
    if task.cancelled():
        return "the agent cancelled itself"
    error = task.exception()
    if error is None:
        return None
    if isinstance(error, AglError):
        return str(error)
    _log.error("an agent failed in a way that is no AgentError", exc_info=error)
    return f"{type(error).__name__}: {error}"
