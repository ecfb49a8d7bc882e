"""Changes of rollouts that callers ask for, and deletion. (Those of attempts: attempts.py.)"""

from __future__ import annotations

import json
from typing import Any, Final, cast, get_args

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.queue import lifecycle
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.answers import recall, remember, rollouts_by_id
from agl_otel.queue.operations.enqueue import checked_config, checked_json, checked_mode, checked_object, current_version
from agl_otel.queue.operations.runs import run_and_step
from agl_otel.queue.operations.tallies import ATTEMPTS, moved
from agl_otel.queue.operations.transitions import find_rollout, place_for, save_statuses, with_status
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import RolloutRow
from agl_otel.types import RolloutStatus

ROLLOUT_STATUSES: Final = frozenset(get_args(RolloutStatus))
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
    return rollouts_by_id(tx, remembered)


def _update_rollout(tx: Transaction, update: pb.RolloutUpdate, now: float) -> None:
    rollout = find_rollout(tx, update.rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {update.rollout_id!r} to update: it was never enqueued, or it was deleted")
    rollout = _change_fields(tx, rollout, update, now)
    if update.HasField("status"):
        if update.status not in ROLLOUT_STATUSES:
            raise UsageError(f"there is no rollout status {update.status!r}: use one of {', '.join(sorted(ROLLOUT_STATUSES))}")
        save_statuses(tx, [with_status(tx, rollout, cast("RolloutStatus", update.status), now)])


def _change_fields(tx: Transaction, rollout: RolloutRow, update: pb.RolloutUpdate, now: float) -> RolloutRow:
    changes: dict[str, Any] = {}
    for name in update.clear:
        if name not in _CLEARABLE:
            raise UsageError(f"a rollout has no field {name!r} that can become null: {', '.join(_CLEARABLE)} can")
        changes |= _CLEARABLE[name]
    if update.HasField("input_json") or "input" in update.clear:
        tx.run("input_update", {"input": checked_json(update.input_json, "input"), "ordinal": rollout.ordinal})
    if update.HasField("mode"):
        changes["mode"] = checked_mode(update.mode)
    if update.HasField("resources_id"):
        changes |= {"resources_id": update.resources_id, "resources_version": current_version(tx, update.resources_id)}
    if update.HasField("config"):
        names = ("timeout_seconds", "unresponsive_seconds", "max_attempts", "retry_condition")
        changes |= dict(zip(names, checked_config(update.config), strict=True))
    if update.HasField("metadata_json"):
        changes["metadata"] = checked_object(update.metadata_json, "metadata")
    if update.HasField("priority"):
        changes["priority"] = update.priority
    if update.HasField("not_before"):
        changes["not_before"] = update.not_before
    if not changes:
        return rollout
    changed = rollout._replace(**changes)
    run, step = run_and_step(changed.metadata, changed.resources_id)
    changed = changed._replace(run=run, step=step)
    if "not_before" in changes and changed.status in lifecycle.QUEUED:
        changed = changed._replace(position=place_for(tx, changed.not_before, now))
        tx.signals.claimable += changed.position is not None
    tx.run("rollout_fields", changed._asdict())
    moved(tx, rollout, changed)
    return changed


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
    tx.runs.deleted = True
    deleted = tx.changed("delete_rollouts", ids)
    tx.signals.settled += request.rollout_ids
    remember(tx, request.request_id, "Delete", deleted, now)
    return pb.DeleteResponse(deleted=deleted)
