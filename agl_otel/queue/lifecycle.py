"""The state machine of rollouts and attempts. Pure: no I/O, no clock.

The rules visible to users are those of Agent Lightning 0.3. An attempt changes first; `propagate` derives its rollout's status, from
the rollout's latest attempt only. Two additions are invisible to callers of 0.3: a claim carries a fencing token (`refusal`), and the
answer to a heartbeat names the attempts that a worker must end (`must_end`).

Decided on purpose: as in 0.3, a call *without* a token may change a terminal state (a late success turns a cancelled or failed rollout
into a succeeded one); a call *with* a token is refused once a newer attempt exists or the rollout was cancelled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from agl_otel.types import TERMINAL_STATUSES, AttemptStatus, RolloutStatus, WorkerStatus

QUEUED: Final[frozenset[RolloutStatus]] = frozenset({"queuing", "requeuing"})
"""Statuses in which a rollout may be claimed."""
ACTIVE: Final[frozenset[RolloutStatus]] = frozenset({"preparing", "running"})
"""Statuses in which the watchdog checks a rollout."""
FINISHED: Final = TERMINAL_STATUSES
OPEN: Final[frozenset[AttemptStatus]] = frozenset({"preparing", "running"})
"""Statuses of an attempt that has not ended and keeps a worker busy."""

_WORKER: Final[dict[AttemptStatus, WorkerStatus]] = {
    "preparing": "busy",
    "running": "busy",
    "succeeded": "idle",
    "failed": "idle",
    "timeout": "unknown",
    "unresponsive": "unknown",
}
_COPIED: Final[dict[AttemptStatus, RolloutStatus]] = {"preparing": "preparing", "running": "running", "succeeded": "succeeded"}


class Policy(NamedTuple):
    """When a rollout times out and is retried (types.RolloutConfig as plain data)."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: tuple[str, ...] = ()


def propagate(attempt: AttemptStatus, *, sequence_id: int, policy: Policy) -> RolloutStatus:
    """Return a rollout's status after its latest attempt, number `sequence_id` (from 1), has changed to `attempt`."""
    if attempt in _COPIED:
        return _COPIED[attempt]
    retried = attempt in policy.retry_condition and sequence_id < policy.max_attempts
    return "requeuing" if retried else "failed"


def observed(attempt: AttemptStatus, rollout: RolloutStatus, *, latest: bool) -> tuple[AttemptStatus, RolloutStatus]:
    """Return the statuses of an attempt and its rollout after a span of the attempt was stored.

    A span starts an attempt or revives an unresponsive one, but never one that ended, timed out or was replaced. With it, and only with
    it, a preparing or requeuing rollout becomes running; a finished rollout stays finished, and a span never starts a queuing one.
    """
    if not latest or attempt not in ("preparing", "unresponsive"):
        return attempt, rollout
    return "running", "running" if rollout in ("preparing", "requeuing") else rollout


def replaced(attempt: AttemptStatus) -> AttemptStatus:
    """Return an attempt's status after a newer one of its rollout has begun: open ones fail, because the watchdog no longer checks them."""
    return "failed" if attempt in OPEN else attempt


def overdue(policy: Policy, *, started: float, last_heartbeat: float | None, now: float) -> AttemptStatus | None:
    """Return `timeout` (checked first), `unresponsive` or None for an attempt of an active rollout. Times are Unix seconds."""
    if policy.timeout_seconds is not None and now - started > policy.timeout_seconds:
        return "timeout"
    alive = started if last_heartbeat is None else last_heartbeat
    if policy.unresponsive_seconds is not None and now - alive > policy.unresponsive_seconds:
        return "unresponsive"
    return None


def worker_status(attempt: AttemptStatus) -> WorkerStatus:
    """Return the worker's status that goes with its attempt's status."""
    return _WORKER[attempt]


def ends_attempt(attempt: AttemptStatus) -> bool:
    """Whether this status sets the attempt's end time (as in 0.3, `timeout` and `unresponsive` do not)."""
    return attempt in ("succeeded", "failed")


def refusal(*, latest: bool, rollout: RolloutStatus) -> str | None:
    """Return why a call with a fencing token is refused, as the predicate of "attempt X of rollout Y …"; None if it is accepted."""
    if not latest:
        return "was replaced by a newer attempt"
    return "was cancelled with its rollout" if rollout == "cancelled" else None


def must_end(attempt: AttemptStatus, rollout: RolloutStatus, *, latest: bool) -> bool:
    """Whether a worker that still runs this attempt must end its agent: cancelled, timed out or replaced."""
    return not latest or rollout == "cancelled" or attempt == "timeout"
