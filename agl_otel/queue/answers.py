"""Request ids: a retry after a lost answer gets the same answer again and has no second effect.

Only the ids and numbers of an answer are kept, so it costs a small row however large its rollouts are; a replay reads the rollouts in
their current state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agl_otel.errors import UsageError
from agl_otel.queue.convert import rollout_fields, rollouts_pb, split
from agl_otel.queue.engine import Transaction
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ROLLOUT_WIDTH, AttemptRow, RolloutRow

KEPT_SECONDS: Final = 600.0  # clients stop retrying long before


def recall(tx: Transaction, request_id: str, method: str) -> Any | None:
    """Return what was remembered for this request id, or None. Raises UsageError if the id was used for another method."""
    return recall_all(tx, [request_id], method).get(request_id)


def recall_all(tx: Transaction, request_ids: Iterable[str], method: str) -> dict[str, Any]:
    """Return {request id: what was remembered for it}, without unknown ids. Raises as `recall`."""
    asked = [request_id for request_id in request_ids if request_id]
    if not asked:
        return {}
    tx.lock_keys(asked)  # a retry may arrive while the first try is still running
    found: dict[str, Any] = {}
    for request_id, used_for, answer in tx.rows("answers_recall", {"request_ids": json.dumps(asked)}):
        if used_for != method:
            raise UsageError(f"request id {request_id!r} was used for {used_for} before: give every call an id of its own")
        found[request_id] = json.loads(answer)
    tx.run_many("answer_replayed", [{"request_id": request_id} for request_id in found])
    return found


def remember(tx: Transaction, request_id: str, method: str, answer: object, now: float) -> None:
    """Store what a replay of the answer needs."""
    remember_all(tx, {request_id: answer}, method, now)


def remember_all(tx: Transaction, answers: Mapping[str, object], method: str, now: float) -> None:
    """`remember` for each request id."""
    rows = [{"request_id": key, "method": method, "answer": json.dumps(answer), "now": now} for key, answer in answers.items() if key]
    tx.run_many("answer_remember", rows)


def purge(tx: Transaction, now: float) -> None:
    """Delete answers too old for a retry."""
    tx.run("answers_purge", {"before": now - KEPT_SECONDS})


def rollouts_by_id(tx: Transaction, rollout_ids: Sequence[str]) -> pb.Rollouts:
    """Return rollouts with their latest attempts, in the order of the ids; unknown ids are skipped."""
    found = {row[1]: row for row in tx.rows("rollouts_by_id", {"rollout_ids": json.dumps(rollout_ids)})}
    return rollouts_pb(found[rollout_id] for rollout_id in rollout_ids if rollout_id in found)


def claims_of(tx: Transaction, attempt_ids: Sequence[str]) -> pb.Rollouts:
    """Return the claims with these attempt ids, tokens included; claims deleted since are skipped."""
    attempts: dict[str, AttemptRow] = {}
    for row in tx.rows("attempts_by_id", {"attempt_ids": json.dumps(attempt_ids)}):
        attempt = split(row)[1]
        attempts[attempt.attempt_id] = attempt
    existing = [attempts[attempt_id] for attempt_id in attempt_ids if attempt_id in attempts]
    ids = json.dumps([attempt.rollout_id for attempt in existing])
    found = {row[1]: row for row in tx.rows("rollouts_by_id", {"rollout_ids": ids})}
    answer = pb.Rollouts()
    for attempt in existing:
        row = found[attempt.rollout_id]
        answer.rollouts.add(**rollout_fields(RolloutRow._make(row[:ROLLOUT_WIDTH]), row[ROLLOUT_WIDTH], attempt, with_token=True))
    return answer
