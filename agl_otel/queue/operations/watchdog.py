"""What time alone brings about: attempts that are overdue, rollouts whose moment has come, answers that are old."""

from __future__ import annotations

from typing import Final

from agl_otel.queue import lifecycle
from agl_otel.queue.convert import split
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.answers import purge
from agl_otel.queue.operations.claims import promote
from agl_otel.queue.operations.transitions import end_reason, propagated, save_statuses, sync_workers
from agl_otel.queue.rows import AttemptRow, RolloutRow

FORGOTTEN_SECONDS: Final = 86400.0  # a service that has been gone for longer was replaced by one at another address


def sweep(tx: Transaction, now: float) -> int:
    """One round of the watchdog. Answers how many attempts it gave up."""
    attempts: list[AttemptRow] = []
    rollouts: list[RolloutRow] = []
    for row in tx.rows("overdue_candidates", {"now": now}):
        rollout, attempt = split(row)
        status = lifecycle.overdue(rollout.policy, started=attempt.start_time, last_heartbeat=attempt.last_heartbeat_time, now=now)
        if status is None:
            continue
        reason = end_reason(status, rollout, attempt)
        attempt = attempt._replace(status=status, error=attempt.error or reason)
        attempts.append(attempt)
        rollouts.append(propagated(tx, rollout, attempt, now, reason=reason))
    tx.run_many("attempt_save", [attempt._asdict() for attempt in attempts])
    save_statuses(tx, rollouts)
    sync_workers(tx, attempts, now)
    promote(tx, now)
    purge(tx, now)
    tx.run("run_tallies_purge")
    tx.run("services_purge", {"before": now - FORGOTTEN_SECONDS})
    return len(attempts)
