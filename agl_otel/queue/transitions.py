"""The writing side of lifecycle.py: change the status of rollouts, attempts and workers, and count the changes.

Counters spare queries from counting rows: each operation counts its changes (Transaction.tallies, engine.RunTallies), and the engine
writes the sums with its commit. Names: `rollouts/STATUS/MODE` (MODE may be empty), `claimable`, `attempts`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeGuard

from agl_otel.queue import lifecycle
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.rows import AttemptRow, RolloutRow
from agl_otel.types import AttemptStatus, RolloutStatus, new_id

ROLLOUTS: Final = "rollouts/"
CLAIMABLE: Final = "claimable"
ATTEMPTS: Final = "attempts"


@lru_cache(maxsize=256)  # there are 7 statuses and 3 modes
def _names(status: RolloutStatus, mode: str | None, placed: bool) -> tuple[str, ...]:
    """Return the counters that count such a rollout."""
    name = f"{ROLLOUTS}{status}/{mode or ''}"
    return (name, CLAIMABLE) if placed and status in lifecycle.QUEUED else (name,)


def moved(tx: Transaction, before: RolloutRow | None, after: RolloutRow | None) -> None:
    """Count a changed rollout; `before` is None for a new one, `after` for a deleted one."""
    for row, change in ((before, -1), (after, 1)):
        if row is not None:
            for name in _names(row.status, row.mode, row.position is not None):
                tx.tallies[name] += change
            tx.runs.count(row, change)


def take_places(tx: Transaction, count: int) -> int:
    """Reserve `count` ascending numbers, for ordinals of rollouts and places in the queue; return the first."""
    last = tx.rows("counter_take", {"name": "place", "count": count})[0][0]
    return last - count + 1


def place_for(tx: Transaction, not_before: float | None, now: float) -> int | None:
    """Reserve a place at the end of the queue; None before `not_before`."""
    return None if not_before is not None and not_before > now else take_places(tx, 1)


def find_rollout(tx: Transaction, rollout_id: str) -> RolloutRow | None:
    """Return one rollout, locked until the transaction ends."""
    row = first(tx.rows("rollout_for_update", {"rollout_id": rollout_id}))
    return None if row is None else RolloutRow._make(row)


def begin_attempts(tx: Transaction, claims: Iterable[tuple[RolloutRow, str | None]], now: float) -> list[tuple[RolloutRow, AttemptRow]]:
    """Begin an attempt, in status preparing, of each (rollout, worker). An open earlier attempt of the rollout ends."""
    pairs: list[tuple[RolloutRow, AttemptRow]] = []
    claims = list(claims)
    _end_replaced(tx, [rollout.latest_attempt_id for rollout, _ in claims if rollout.latest_attempt_id is not None], now)
    for rollout, worker_id in claims:
        number = rollout.attempt_count + 1
        token = os.urandom(12).hex()
        attempt = AttemptRow(
            new_id("at"), rollout.rollout_id, number, "preparing", now, None, worker_id, None, token, seals=None, error=None, metadata=None
        )
        changed = rollout._replace(status="preparing", attempt_count=number, latest_attempt_id=attempt.attempt_id)
        pairs.append((changed, attempt))
        moved(tx, rollout, changed)
    tx.tallies[ATTEMPTS] += len(pairs)
    tx.run_many("attempt_insert", [attempt for _, attempt in pairs])
    tx.run_many(
        "rollout_attempted",
        [{"attempt_count": r.attempt_count, "latest_attempt_id": r.latest_attempt_id, "ordinal": r.ordinal} for r, _ in pairs],
    )
    return pairs


def _end_replaced(tx: Transaction, attempt_ids: Sequence[str], now: float) -> None:
    """End attempts that newer ones replace, by lifecycle.replaced."""
    if not attempt_ids:
        return
    attempts = map(AttemptRow._make, tx.rows("attempts_of_held", {"attempt_ids": json.dumps(attempt_ids)}))
    ended = [
        attempt._replace(status=status, end_time=now, error=attempt.error or "it was replaced by a newer attempt")
        for attempt in attempts
        if (status := lifecycle.replaced(attempt.status)) != attempt.status
    ]
    tx.run_many("attempt_save", ended)


def with_status(tx: Transaction, rollout: RolloutRow, status: RolloutStatus, now: float, *, reason: str | None = None) -> RolloutRow:
    """Change a rollout's status: a terminal one sets its end time, a queued one puts it at the end of the queue unless it is in it.

    Counts and signals the change; `save_statuses` writes it.
    """
    position = rollout.position
    if status in lifecycle.QUEUED and rollout.status not in lifecycle.QUEUED:
        position = place_for(tx, rollout.not_before, now)
        tx.signals.claimable += position is not None
    end_time = now if status in lifecycle.FINISHED else rollout.end_time
    changed = rollout._replace(status=status, position=position, end_time=end_time, reason=reason if status == "failed" else None)
    moved(tx, rollout, changed)
    if status in lifecycle.FINISHED:
        tx.signals.settled.append(rollout.rollout_id)
        if rollout.status not in lifecycle.FINISHED:
            tx.signals.ended.append((status, rollout.mode or "unknown", now - rollout.start_time))
    return changed


def save_statuses(tx: Transaction, rollouts: Iterable[RolloutRow]) -> None:
    """Write the changes of `with_status`."""
    tx.run_many(
        "rollout_status",
        [
            {"status": row.status, "position": row.position, "end_time": row.end_time, "reason": row.reason, "ordinal": row.ordinal}
            for row in rollouts
        ],
    )


def propagated(tx: Transaction, rollout: RolloutRow, attempt: AttemptRow, now: float, *, reason: str | None = None) -> RolloutRow:
    """Change a rollout's status, as `with_status`, to follow its attempt; only its latest attempt counts."""
    if rollout.latest_attempt_id != attempt.attempt_id:
        return rollout
    status = lifecycle.propagate(attempt.status, sequence_id=attempt.sequence_id, policy=rollout.policy)
    return with_status(tx, rollout, status, now, reason=reason or attempt.error)


def sync_workers(tx: Transaction, attempts: Iterable[AttemptRow], now: float, *, dequeued: bool = False) -> None:
    """Set the status of each attempt's worker from the attempts' statuses, in order, skipping repetitions."""
    by_worker: dict[str, list[AttemptRow]] = {}
    for attempt in attempts:
        if attempt.worker_id is None:
            continue
        before = by_worker.setdefault(attempt.worker_id, [])
        if before and lifecycle.worker_status(before[-1].status) == lifecycle.worker_status(attempt.status):
            before.pop()
        before.append(attempt)
    workers = sorted(by_worker)  # sorted, so that two transactions cannot deadlock
    for turn in range(max(map(len, by_worker.values()), default=0)):
        attempts = [by_worker[worker_id][turn] for worker_id in workers if turn < len(by_worker[worker_id])]
        busy: list[dict[str, object]] = []
        free: list[dict[str, object]] = []
        for attempt in attempts:
            status = lifecycle.worker_status(attempt.status)
            if status == "busy":
                at = {"rollout_id": attempt.rollout_id, "attempt_id": attempt.attempt_id, "dequeued": now if dequeued else None}
                busy.append({"worker_id": attempt.worker_id, "now": now, **at})
            else:
                free.append({"worker_id": attempt.worker_id, "now": now, "status": status})
        tx.run_many("worker_busy", busy)
        tx.run_many("worker_free", free)


def end_reason(status: AttemptStatus, rollout: RolloutRow, attempt: AttemptRow) -> str:
    """Return a message why the watchdog ended an attempt."""
    number = f"attempt {attempt.attempt_id} ({attempt.sequence_id} of {rollout.max_attempts})"
    if status == "timeout":
        return f"{number} ran longer than {rollout.timeout_seconds:g} s"
    return f"{number} was silent for more than {rollout.unresponsive_seconds:g} s"


# --- runs

LONGEST_NAME: Final = 256
"""Most characters of a run's name in metadata; a longer one is ignored. (PostgreSQL bounds the size of index entries.)"""


def run_and_step(metadata: str | None, resources_id: str | None) -> tuple[str, int | None]:
    """Return the run (metadata's `run`, else `resources_id`, else empty) and metadata's `step`."""
    named: Any = None
    if metadata and any(word in metadata for word in ('"run"', '"step"', "\\u")):
        with contextlib.suppress(ValueError, RecursionError):  # metadata that is no JSON names no run
            named = json.loads(metadata)
    run, step = (named.get("run"), named.get("step")) if isinstance(named, dict) else (None, None)
    is_number = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53
    return run if _is_name(run) else resources_id or "", step if is_number else None


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and not any("\ud800" <= each <= "\udfff" for each in value)
