"""Changes of rollouts and attempts that callers ask for, and deletion."""

from __future__ import annotations

import json
from typing import Any, Final, cast, get_args

from agl_otel.errors import AglError, FencedError, NotFoundError, UsageError, grpc_status
from agl_otel.queue import lifecycle
from agl_otel.queue.convert import attempt_pb, split
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.answers import recall, remember, rollouts_by_id
from agl_otel.queue.operations.enqueue import ATTEMPT_STATUSES, checked_config, checked_mode, current_version
from agl_otel.queue.operations.tallies import ATTEMPTS, moved
from agl_otel.queue.operations.transitions import find_attempt, find_rollout, place_for, propagate, set_rollout_status, sync_worker
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, RolloutRow
from agl_otel.types import AttemptStatus, RolloutStatus

ROLLOUT_STATUSES: Final = frozenset(get_args(RolloutStatus))
LATEST: Final = "latest"
_CLEARABLE: Final = {
    "input": {},
    "mode": {"mode": None},
    "resources_id": {"resources_id": None, "resources_version": None},
    "config": {"timeout_seconds": None, "unresponsive_seconds": None, "max_attempts": 1, "retry_condition": "[]"},
    "metadata": {"metadata": None},
    "not_before": {"not_before": None},
}


def update_rollouts(tx: Transaction, request: pb.UpdateRolloutsRequest, now: float) -> pb.Rollouts:
    """Change rollouts; their attempts are not touched. All or nothing. Raises NotFoundError, UsageError."""
    remembered = recall(tx, request.request_id, "UpdateRollouts")
    if remembered is None:
        tx.hold([update.rollout_id for update in request.updates])
        for update in request.updates:
            _update_rollout(tx, update, now)
        remembered = [update.rollout_id for update in request.updates]
        remember(tx, request.request_id, "UpdateRollouts", remembered, now)
    return pb.Rollouts(rollouts=rollouts_by_id(tx, remembered))


def _update_rollout(tx: Transaction, update: pb.RolloutUpdate, now: float) -> None:
    rollout = find_rollout(tx, update.rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {update.rollout_id!r} to update: it was never enqueued, or it was deleted")
    rollout = _change_fields(tx, rollout, update, now)
    if update.HasField("status"):
        if update.status not in ROLLOUT_STATUSES:
            raise UsageError(f"there is no rollout status {update.status!r}: use one of {', '.join(sorted(ROLLOUT_STATUSES))}")
        set_rollout_status(tx, rollout, cast("RolloutStatus", update.status), now)


def _change_fields(tx: Transaction, rollout: RolloutRow, update: pb.RolloutUpdate, now: float) -> RolloutRow:
    changes: dict[str, Any] = {}
    for name in update.clear:
        if name not in _CLEARABLE:
            raise UsageError(f"a rollout has no field {name!r} that can become null: {', '.join(_CLEARABLE)} can")
        changes |= _CLEARABLE[name]
    if update.HasField("input_json") or "input" in update.clear:
        tx.run("input_update", {"input": update.input_json or "null", "ordinal": rollout.ordinal})
    if update.HasField("mode"):
        changes["mode"] = checked_mode(update.mode)
    if update.HasField("resources_id"):
        changes |= {"resources_id": update.resources_id, "resources_version": current_version(tx, update.resources_id)}
    if update.HasField("config"):
        names = ("timeout_seconds", "unresponsive_seconds", "max_attempts", "retry_condition")
        changes |= dict(zip(names, checked_config(update.config), strict=True))
    if update.HasField("metadata_json"):
        changes["metadata"] = update.metadata_json
    if update.HasField("priority"):
        changes["priority"] = update.priority
    if update.HasField("not_before"):
        changes["not_before"] = update.not_before
    if not changes:
        return rollout
    changed = rollout._replace(**changes)
    if "not_before" in changes and changed.status in lifecycle.QUEUED:
        changed = changed._replace(position=place_for(tx, changed.not_before, now))
        tx.signals.claimable += changed.position is not None
    tx.run("rollout_fields", changed._asdict())
    moved(tx, rollout, changed)
    return changed


def update_attempts(tx: Transaction, request: pb.UpdateAttemptsRequest, now: float) -> pb.Attempts:
    """Change attempts, and what follows for their rollouts and workers. All or nothing, or with `each` whatever can be done.

    Raises (without `each`) NotFoundError, UsageError, and FencedError where a token is given and the claim is void.
    """
    remembered = recall(tx, request.request_id, "UpdateAttempts")
    if remembered is None:
        tx.hold([update.rollout_id for update in request.updates])
        changed: list[AttemptRow] = []
        refusals: list[tuple[int, str, str]] = []
        for index, update in enumerate(request.updates):
            try:
                changed.append(_update_attempt(tx, update, now))
            except AglError as error:  # before it has written anything
                if not request.each:
                    raise
                refusals.append((index, grpc_status(error), str(error)))
        remember(tx, request.request_id, "UpdateAttempts", [[attempt.attempt_id for attempt in changed], refusals], now)
    else:
        attempt_ids, refusals = remembered
        rows = (split(row)[1] for row in tx.rows("attempts_by_id", {"attempt_ids": json.dumps(attempt_ids)}))
        found = {attempt.attempt_id: attempt for attempt in rows}
        changed = [found[attempt_id] for attempt_id in attempt_ids if attempt_id in found]
    answer = pb.Attempts(attempts=[attempt_pb(attempt) for attempt in changed], total=len(changed))
    answer.refusals.extend(pb.Refusal(index=index, status=status, message=message) for index, status, message in refusals)
    return answer


def _update_attempt(tx: Transaction, update: pb.AttemptUpdate, now: float) -> AttemptRow:
    """All that may be refused is asked first, so that a refused update has written nothing."""
    rollout, attempt = _addressed(tx, update)
    if update.HasField("token"):
        _fence(rollout, attempt, update.token)
    changes: dict[str, Any] = {
        name: None for name in update.clear if name in ("metadata", "worker_id", "last_heartbeat_time", "error", "seals")
    }
    for name in ("worker_id", "last_heartbeat_time", "error"):
        if update.HasField(name):
            changes[name] = getattr(update, name)
    if update.HasField("metadata_json"):
        changes["metadata"] = update.metadata_json
    if update.has_seals:
        changes["seals"] = json.dumps(dict(update.seals))
    if update.HasField("status"):
        if update.status not in ATTEMPT_STATUSES:
            raise UsageError(f"there is no attempt status {update.status!r}: use one of {', '.join(sorted(ATTEMPT_STATUSES))}")
        changes["status"] = update.status
        if lifecycle.ends_attempt(cast("AttemptStatus", update.status)):
            changes["end_time"] = now
    attempt = attempt._replace(**changes)
    tx.run("attempt_save", attempt._asdict())
    if update.HasField("status"):
        propagate(tx, rollout, attempt, now)
    if update.HasField("status") or update.HasField("worker_id"):
        sync_worker(tx, attempt, now)
    return attempt


def _addressed(tx: Transaction, update: pb.AttemptUpdate) -> tuple[RolloutRow, AttemptRow]:
    rollout = find_rollout(tx, update.rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {update.rollout_id!r}: it was never enqueued, or it was deleted")
    attempt_id = rollout.latest_attempt_id if update.attempt_id == LATEST else update.attempt_id
    if attempt_id is None:
        raise NotFoundError(f"rollout {rollout.rollout_id} has no attempt yet: claim it, or call start_attempt")
    attempt = find_attempt(tx, rollout.rollout_id, attempt_id)
    if attempt is None:
        raise NotFoundError(f"rollout {rollout.rollout_id} has no attempt {attempt_id!r}")
    return rollout, attempt


def _fence(rollout: RolloutRow, attempt: AttemptRow, token: str) -> None:
    if token != attempt.token:
        raise FencedError(
            f"the token is not that of attempt {attempt.attempt_id} of rollout {rollout.rollout_id}: only its claimer may report"
        )
    latest = rollout.latest_attempt_id == attempt.attempt_id
    if (why := lifecycle.refusal(latest=latest, rollout=rollout.status)) is not None:
        raise FencedError(f"attempt {attempt.attempt_id} of rollout {rollout.rollout_id} {why}: end the agent and drop its result")


def delete(tx: Transaction, request: pb.DeleteRequest, now: float) -> pb.DeleteResponse:
    """Remove rollouts with their attempts, counters and keys; unknown ids are left out. Answers how many there were."""
    remembered = recall(tx, request.request_id, "Delete")
    if remembered is not None:
        return pb.DeleteResponse(deleted=remembered)
    ids = {"rollout_ids": json.dumps(list(request.rollout_ids))}
    tx.hold(request.rollout_ids)
    for statement in ("delete_inputs", "delete_sequences", "delete_enqueue_keys"):
        tx.run(statement, ids)
    tx.tallies[ATTEMPTS] -= tx.changed("delete_attempts", ids)
    for row in tx.rows("delete_found", ids):
        moved(tx, RolloutRow._make(row), None)
    deleted = tx.changed("delete_rollouts", ids)
    tx.signals.settled += request.rollout_ids
    remember(tx, request.request_id, "Delete", deleted, now)
    return pb.DeleteResponse(deleted=deleted)
