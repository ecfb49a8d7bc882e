"""Changes of attempts by callers, and the resulting changes of their rollouts and workers.

A batch is read at once, changed in memory in the order of its updates, and only the final rows are written, so that a hundred results
cost a handful of statements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from pydantic import ValidationError

from agl_otel.errors import AglError, FencedError, NotFoundError, UsageError, grpc_status
from agl_otel.queue import lifecycle
from agl_otel.queue.answers import recall_all, remember_all
from agl_otel.queue.batcher import AT_MOST
from agl_otel.queue.convert import attempt_fields, split
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.checks import ATTEMPT_STATUSES, checked_object
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, RolloutRow
from agl_otel.queue.transitions import propagated, save_statuses, sync_workers
from agl_otel.types import AttemptLedger, AttemptStatus
from agl_otel.types.model import describe_invalid

LATEST: Final = "latest"
_COPIED: Final = ("worker_id", "last_heartbeat_time", "error")
_CLEARABLE: Final = (*_COPIED, "metadata", "seals", "ledger")


def weight(request: pb.UpdateAttemptsRequest) -> int:
    """Return a request's weight in a batch: its number of updates, or AT_MOST if one refusal must undo the earlier updates."""
    return max(len(request.updates), 1) if request.each or len(request.updates) <= 1 else AT_MOST


def update_all(tx: Transaction, requests: Sequence[pb.UpdateAttemptsRequest], now: float) -> list[pb.Attempts | AglError]:
    """Change attempts; their rollouts and workers follow. A request is all or nothing; with `each` its updates are independent.

    Returns for each request the changed attempts or, without `each`, the error that refused it: NotFoundError, UsageError, or FencedError
    if a token is given and the claim is void. Raises that error if earlier updates of the request must be undone.
    """
    known = recall_all(tx, (request.request_id for request in requests), "UpdateAttempts")
    batch = _Batch(tx, [update for request in requests if request.request_id not in known for update in request.updates])
    kept: dict[str, object] = {}
    answers: list[pb.Attempts | AglError] = []
    for request in requests:
        if request.request_id in known:
            attempt_ids, refusals = known[request.request_id]
            answers.append(_answer(_attempts_by_id(tx, attempt_ids), refusals))
            continue
        changed: list[AttemptRow] = []
        refusals: list[tuple[int, str, str]] = []
        refused: AglError | None = None
        for index, update in enumerate(request.updates):
            try:
                changed.append(batch.change(update, now))
            except AglError as error:  # this update has changed nothing yet
                if not request.each:
                    if changed:
                        raise
                    refused = error
                    break
                refusals.append((index, grpc_status(error), str(error)))
        if refused is None:
            kept[request.request_id] = [[attempt.attempt_id for attempt in changed], refusals]
        answers.append(refused or _answer(changed, refusals))
    batch.write(now)
    remember_all(tx, kept, "UpdateAttempts", now)
    return answers


def _attempts_by_id(tx: Transaction, attempt_ids: Sequence[str]) -> list[AttemptRow]:
    """Return attempts in the order of the ids; deleted ones are skipped."""
    rows = (split(row)[1] for row in tx.rows("attempts_by_id", {"attempt_ids": json.dumps(attempt_ids)}))
    found = {attempt.attempt_id: attempt for attempt in rows}
    return [found[attempt_id] for attempt_id in attempt_ids if attempt_id in found]


def _answer(changed: Sequence[AttemptRow], refusals: Iterable[tuple[int, str, str]]) -> pb.Attempts:
    answer = pb.Attempts(total=len(changed))
    for attempt in changed:
        answer.attempts.add(**attempt_fields(attempt))
    answer.refusals.extend(pb.Refusal(index=index, status=status, message=message) for index, status, message in refusals)
    return answer


class _Batch:
    """The rollouts and attempts of some updates, locked until the transaction ends."""

    def __init__(self, tx: Transaction, updates: Sequence[pb.AttemptUpdate]) -> None:
        self._tx = tx
        ids = json.dumps([*{update.rollout_id: None for update in updates}])
        rows = map(RolloutRow._make, tx.rows("rollouts_for_update", {"rollout_ids": ids}))
        self._rollouts = {row.rollout_id: row for row in rows}
        attempt_ids = {found: None for update in updates if (found := self._attempt_id(update)) is not None}
        attempts = map(AttemptRow._make, tx.rows("attempts_of_held", {"attempt_ids": json.dumps([*attempt_ids])}))
        self._attempts = {row.attempt_id: row for row in attempts}
        self._saved: set[str] = set()
        self._moved: set[str] = set()
        self._synced: list[AttemptRow] = []

    def change(self, update: pb.AttemptUpdate, now: float) -> AttemptRow:
        """Apply one update in memory. All checks come first, so that a refused update changes nothing."""
        rollout, attempt = self._addressed(update)
        if update.HasField("token"):
            _fence(rollout, attempt, update.token)
        attempt = attempt._replace(**_changes(update, now))
        self._attempts[attempt.attempt_id] = attempt
        self._saved.add(attempt.attempt_id)
        if update.HasField("status") and rollout.latest_attempt_id == attempt.attempt_id:
            self._rollouts[rollout.rollout_id] = propagated(self._tx, rollout, attempt, now)
            self._moved.add(rollout.rollout_id)
        if update.HasField("status") or update.HasField("worker_id"):
            self._synced.append(attempt)
        return attempt

    def write(self, now: float) -> None:
        """Write the changed rows."""
        self._tx.run_many("attempt_save", [row for row in self._attempts.values() if row.attempt_id in self._saved])
        save_statuses(self._tx, [row for row in self._rollouts.values() if row.rollout_id in self._moved])
        sync_workers(self._tx, self._synced, now)

    def _attempt_id(self, update: pb.AttemptUpdate) -> str | None:
        if update.attempt_id != LATEST:
            return update.attempt_id
        rollout = self._rollouts.get(update.rollout_id)
        return None if rollout is None else rollout.latest_attempt_id

    def _addressed(self, update: pb.AttemptUpdate) -> tuple[RolloutRow, AttemptRow]:
        rollout = self._rollouts.get(update.rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {update.rollout_id!r}: it was never enqueued, or it was deleted")
        attempt_id = self._attempt_id(update)
        if attempt_id is None:
            raise NotFoundError(f"rollout {rollout.rollout_id} has no attempt yet: claim it, or call start_attempt")
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.rollout_id != rollout.rollout_id:
            raise NotFoundError(f"rollout {rollout.rollout_id} has no attempt {attempt_id!r}")
        return rollout, attempt


def _changes(update: pb.AttemptUpdate, now: float) -> dict[str, Any]:
    """Return the columns that an update changes. Raises UsageError."""
    changes: dict[str, Any] = {name: None for name in update.clear if name in _CLEARABLE}
    for name in _COPIED:
        if update.HasField(name):
            changes[name] = getattr(update, name)
    if update.HasField("metadata_json"):
        changes["metadata"] = checked_object(update.metadata_json, "metadata")
    if update.has_seals:
        changes["seals"] = json.dumps(dict(update.seals))
    if update.HasField("ledger_json"):
        changes["ledger"] = _checked_ledger(update.ledger_json)
    if update.HasField("status"):
        if update.status not in ATTEMPT_STATUSES:
            raise UsageError(f"there is no attempt status {update.status!r}: use one of {', '.join(sorted(ATTEMPT_STATUSES))}")
        changes["status"] = update.status
        if lifecycle.ends_attempt(cast("AttemptStatus", update.status)):
            changes["end_time"] = now
    return changes


def _checked_ledger(text: str) -> str:
    """Validate and normalise a ledger. Raises UsageError."""
    try:
        return AttemptLedger.model_validate_json(text).model_dump_json(exclude_defaults=True)
    except ValidationError as error:
        raise UsageError(f"this is no ledger of an attempt: {describe_invalid(error)}") from None


def _fence(rollout: RolloutRow, attempt: AttemptRow, token: str) -> None:
    if token != attempt.token:
        raise FencedError(
            f"the token is not that of attempt {attempt.attempt_id} of rollout {rollout.rollout_id}: only its claimer may report"
        )
    latest = rollout.latest_attempt_id == attempt.attempt_id
    if (why := lifecycle.refusal(latest=latest, rollout=rollout.status)) is not None:
        raise FencedError(f"attempt {attempt.attempt_id} of rollout {rollout.rollout_id} {why}: end the agent and drop its result")
