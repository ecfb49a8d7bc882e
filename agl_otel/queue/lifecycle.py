"""The state machine of rollouts and attempts: who may go from which state to which. Pure: no I/O, no clock.

The rules are Agent Lightning 0.3's where its users can see them. An attempt moves first; `propagate` says what that makes of
its rollout, and only the latest attempt of a rollout is asked. Two things are new and do not change what 0.3's callers see:
a claim carries a fencing token (`refusal`), and a heartbeat tells a worker which attempts to end (`must_end`).

Decided on purpose: a call *without* a token is not guarded by a terminal state, as in 0.3 (a late success turns a cancelled or
failed rollout into a succeeded one); a call *with* its token is refused once a newer attempt exists or the rollout was cancelled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from agl_otel.types import TERMINAL_STATUSES, AttemptStatus, RolloutStatus, WorkerStatus

QUEUED: Final[frozenset[RolloutStatus]] = frozenset({"queuing", "requeuing"})
"""A rollout in one of these may be claimed."""
ACTIVE: Final[frozenset[RolloutStatus]] = frozenset({"preparing", "running"})
"""A rollout in one of these is watched."""
FINISHED: Final = TERMINAL_STATUSES
OPEN: Final[frozenset[AttemptStatus]] = frozenset({"preparing", "running"})
"""An attempt in one of these has not ended, and a worker is busy with it."""

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
    """How a rollout is watched and retried (types.RolloutConfig as plain data)."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: tuple[str, ...] = ()


def propagate(attempt: AttemptStatus, *, sequence_id: int, policy: Policy) -> RolloutStatus:
    """What a rollout becomes when its latest attempt, number `sequence_id` (from 1), becomes `attempt`."""
    if attempt in _COPIED:
        return _COPIED[attempt]
    retried = attempt in policy.retry_condition and sequence_id < policy.max_attempts
    return "requeuing" if retried else "failed"


def observed(attempt: AttemptStatus, rollout: RolloutStatus, *, latest: bool) -> tuple[AttemptStatus, RolloutStatus]:
    """What an attempt and its rollout become when a span of the attempt was stored.

    A span starts an attempt or revives an unresponsive one, never one that ended, timed out or was replaced. Its rollout runs with it and
    never without it: a rollout that waits for its next attempt stays in the queue. A finished rollout stays finished, and a queuing one
    is not started by a span.
    """
    if not latest or attempt not in ("preparing", "unresponsive"):
        return attempt, rollout
    return "running", "running" if rollout in ("preparing", "requeuing") else rollout


def replaced(attempt: AttemptStatus) -> AttemptStatus:
    """What an attempt becomes when a newer one of its rollout begins: it is watched no more, so one that is open fails."""
    return "failed" if attempt in OPEN else attempt


def overdue(policy: Policy, *, started: float, last_heartbeat: float | None, now: float) -> AttemptStatus | None:
    """What the watchdog makes of an attempt of an active rollout: `timeout` (asked first), `unresponsive`, or None. Unix seconds."""
    if policy.timeout_seconds is not None and now - started > policy.timeout_seconds:
        return "timeout"
    alive = started if last_heartbeat is None else last_heartbeat
    if policy.unresponsive_seconds is not None and now - alive > policy.unresponsive_seconds:
        return "unresponsive"
    return None


def worker_status(attempt: AttemptStatus) -> WorkerStatus:
    """What a worker is while, or after, its attempt is in this state."""
    return _WORKER[attempt]


def ends_attempt(attempt: AttemptStatus) -> bool:
    """Whether this state stamps the attempt's end time (as in 0.3, a timeout and a silence do not)."""
    return attempt in ("succeeded", "failed")


def refusal(*, latest: bool, rollout: RolloutStatus) -> str | None:
    """Why a call with a fencing token is void, in words that follow "attempt X of rollout Y …"; None where it is good."""
    if not latest:
        return "was replaced by a newer attempt"
    return "was cancelled with its rollout" if rollout == "cancelled" else None


def must_end(attempt: AttemptStatus, rollout: RolloutStatus, *, latest: bool) -> bool:
    """Whether a worker that still runs this attempt should end its agent: cancelled, timed out or replaced."""
    return not latest or rollout == "cancelled" or attempt == "timeout"
