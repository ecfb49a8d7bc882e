"""Supervise one attempt while its agent runs: its time limit, its cancellation and its outcome.

`Run.end` ends it, on a request of the queue, at its time limit or when the runner stops. The agent's task is cancelled and awaited,
because a command's processes are gone only then. A task that ignores cancellation is abandoned and delays nothing.
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

ABANDON_SECONDS: Final = 20.0  # longer than a command agent needs for SIGTERM, SIGKILL and draining its output
EndReason = Literal["cancelled", "stopped", "timeout"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerEvent:
    """The start or end of an attempt, for observers of a runner."""

    kind: Literal["started", "ended"]
    rollout_id: str
    attempt_id: str
    outcome: str = ""
    """succeeded, failed, timeout or cancelled; empty for a start."""
    error: str | None = None
    seconds: float = 0.0
    """How long the agent ran."""
    spans: int | None = None
    """Spans created for it; None where its agent's processes are not counted here."""
    reward: float | None = None
    """The last primary reward that this process emitted for it."""


@dataclass(slots=True)
class Run:
    """One claimed attempt, until its agent has ended."""

    rollout: AttemptedRollout
    runner_limit_seconds: float | None = None
    """The runner's time limit, in addition to the rollout's."""
    reason: EndReason | None = None
    """Why it was ended early."""
    abandoned: bool = False
    claimed_at: float = field(default_factory=time.monotonic)
    _end_requested: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def limit_seconds(self) -> float | None:
        """The shorter of the rollout's and the runner's time limits; None: unlimited."""
        return min((limit for limit in (self.rollout.config.timeout_seconds, self.runner_limit_seconds) if limit is not None), default=None)

    def end(self, reason: EndReason) -> None:
        """Request its end. The first request determines the reason."""
        self.reason = self.reason or reason
        self._end_requested.set()

    async def supervise(self, agent: Agent, job: Job) -> Ended:
        """Run the agent to its end. Raises only CancelledError, after the agent has ended."""
        if self.reason is not None:  # ended before it started
            return self._ended(job, None, 0.0)
        began = time.monotonic()
        limit = self.limit_seconds
        task = asyncio.create_task(agent.run(job))
        requested = asyncio.create_task(self._end_requested.wait())
        try:
            left = None if limit is None else max(0.0, limit - (began - self.claimed_at))
            done, _ = await asyncio.wait({task, requested}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.end("timeout")
        finally:
            requested.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=ABANDON_SECONDS)
                self.abandoned = not task.done()
        return self._ended(job, task, time.monotonic() - began)

    def _ended(self, job: Job, task: asyncio.Task[None] | None, seconds: float) -> Ended:
        error = _error_of(task) if task is not None and task.done() else None
        match self.reason:
            case "cancelled":
                return Ended(job, "failed", "the queue ended the attempt", report=False, seconds=seconds)
            case "timeout":
                return Ended(job, "timeout", f"{job.works} ran past the attempt's {self.limit_seconds:g} s", seconds=seconds)
            case "stopped" if task is None or task.cancelled() or not task.done():
                return Ended(job, "failed", f"the runner was stopped before {job.works} had ended", seconds=seconds)
            case _:
                return Ended(job, "failed" if error else "succeeded", error, seconds=seconds)


def outcome_of(ended: Ended) -> str:
    """Return the outcome for RunnerEvent: the status, or cancelled where the queue ended the attempt."""
    return ended.status if ended.report else "cancelled"


def _error_of(task: asyncio.Task[None]) -> str | None:
    """Return the error message of the agent's task; None where it succeeded."""
    if task.cancelled():
        return "the agent cancelled itself"
    error = task.exception()
    if error is None:
        return None
    if isinstance(error, AglError):
        return str(error)
    _log.error("an agent raised an unexpected exception", exc_info=error)
    return f"{type(error).__name__}: {error}"
