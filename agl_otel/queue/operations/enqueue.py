"""New rollouts, queued (enqueue) or started at once (start), and further attempts on request (start_attempt)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from agl_otel.errors import ConflictError, NotFoundError, UsageError
from agl_otel.queue.answers import claims_of, recall, remember, rollouts_by_id
from agl_otel.queue.convert import joined_fields, rollout_fields
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.checks import checked_config, checked_json, checked_mode, checked_object, worker_of
from agl_otel.queue.operations.claim import claim_all
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import InputRow, RolloutRow
from agl_otel.queue.transitions import begin_attempts, find_rollout, moved, run_and_step, sync_workers, take_places
from agl_otel.types import ADOPTED, NOT_RUN, check_id, new_id

NO_CONFIG: Final = (None, None, 1, "[]")
"""The result of checked_config for a rollout without a config."""


def enqueue(tx: Transaction, request: pb.EnqueueRequest, now: float) -> pb.Rollouts:
    """Put new rollouts at the end of the queue, in order; a known id returns the existing rollout."""
    remembered = recall(tx, request.request_id, "Enqueue")
    if remembered is not None:
        return rollouts_by_id(tx, remembered)
    key = request.idempotency_key if request.HasField("idempotency_key") else None
    if key is not None and (known := _by_key(tx, key, request)) is not None:
        return known
    answer, rows = _insert_new(tx, request.rollouts, now, queued=True)
    tx.signals.claimable += sum(row.position is not None for row in rows)
    if key is not None:
        items = enumerate(zip(answer.rollouts, _fingerprints(request), strict=True))
        tx.run_many(
            "key_insert", [{"idempotency_key": key, "item": i, "rollout_id": r.rollout_id, "fingerprint": f} for i, (r, f) in items]
        )
    remember(tx, request.request_id, "Enqueue", [rollout.rollout_id for rollout in answer.rollouts], now)
    return answer


def enqueue_and_claim(
    tx: Transaction, request: pb.EnqueueRequest, claims: Sequence[pb.ClaimRequest], now: float
) -> tuple[pb.Rollouts, list[pb.Rollouts]]:
    """Enqueue rollouts and serve waiting claims, in order, from the queue; return both answers."""
    answer = enqueue(tx, request, now)
    handed = claim_all(tx, claims, now)
    tx.signals.claimable = max(0, tx.signals.claimable - sum(len(found.rollouts) for found in handed))
    return answer, handed


def start(tx: Transaction, request: pb.StartRequest, now: float) -> pb.Rollouts:
    """Create rollouts that are never queued, each with a first attempt; a known id returns the existing rollout."""
    remembered = recall(tx, request.request_id, "Start")
    if remembered is not None:
        return _started_again(tx, remembered)
    answer, rows = _insert_new(tx, request.rollouts, now, queued=False)
    pairs = {row.rollout_id: (row, attempt) for row, attempt in begin_attempts(tx, [(row, worker_of(request)) for row in rows], now)}
    sync_workers(tx, (attempt for _, attempt in pairs.values()), now)
    for rollout in answer.rollouts:
        if (pair := pairs.pop(rollout.rollout_id, None)) is not None:
            begun, attempt = pair
            rollout.CopyFrom(pb.Rollout(**rollout_fields(begun, rollout.input_json, attempt, with_token=True)))
    taken = [(r.rollout_id, r.attempt.attempt_id if r.HasField("token") else None) for r in answer.rollouts]
    remember(tx, request.request_id, "Start", taken, now)
    return answer


def _started_again(tx: Transaction, begun: Sequence[tuple[str, str | None]]) -> pb.Rollouts:
    claims = {r.rollout_id: r for r in claims_of(tx, [attempt_id for _, attempt_id in begun if attempt_id]).rollouts}
    rollouts = rollouts_by_id(tx, [rollout_id for rollout_id, _ in begun]).rollouts
    return pb.Rollouts(rollouts=[claims.get(rollout.rollout_id, rollout) for rollout in rollouts])


def start_attempt(tx: Transaction, request: pb.StartAttemptRequest, now: float) -> pb.Rollouts:
    """Begin a further attempt of each rollout, regardless of its status and max_attempts. Raises NotFoundError."""
    remembered = recall(tx, request.request_id, "StartAttempt")
    if remembered is not None:
        return claims_of(tx, remembered)
    attempt_ids: list[str] = []
    tx.lock_rollouts(request.rollout_ids)
    for rollout_id in request.rollout_ids:
        rollout = find_rollout(tx, rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r} to attempt: enqueue it first")
        [(_, attempt)] = begin_attempts(tx, [(rollout, worker_of(request))], now)
        sync_workers(tx, [attempt], now)
        attempt_ids.append(attempt.attempt_id)
    remember(tx, request.request_id, "StartAttempt", attempt_ids, now)
    return claims_of(tx, attempt_ids)


def _insert_new(tx: Transaction, requests: Sequence[pb.NewRollout], now: float, *, queued: bool) -> tuple[pb.Rollouts, list[RolloutRow]]:
    """Insert the rollouts with new ids; return the rollout of every request (the existing one for a known id), and the new rows."""
    answer = pb.Rollouts()
    own = [check_id(new.rollout_id, "rollout id") for new in requests if new.HasField("rollout_id")]
    known = {row[1]: pb.Rollout(**joined_fields(row)) for row in tx.rows("rollouts_by_id", {"rollout_ids": json.dumps(own)})} if own else {}
    latest = _current_resources(tx, None) if any(not new.HasField("resources_id") for new in requests) else None
    versions: dict[str, tuple[str, int | None]] = {}
    ordinal = take_places(tx, len(requests)) if requests else 0
    rows: list[RolloutRow] = []
    inputs: list[InputRow] = []
    for new in requests:
        if new.rollout_id in known:
            answer.rollouts.append(known[new.rollout_id])
            continue
        resources = latest
        if new.HasField("resources_id"):
            if new.resources_id not in versions:
                versions[new.resources_id] = _current_resources(tx, new.resources_id) or (new.resources_id, None)
            resources = versions[new.resources_id]
        row = _row(new, ordinal, resources, now, queued=queued)
        task = checked_json(new.input_json, "input")
        rollout = answer.rollouts.add(**rollout_fields(row, task))
        rows.append(row)
        inputs.append(InputRow(ordinal, task))
        if new.HasField("rollout_id"):
            known[new.rollout_id] = rollout
        ordinal += 1
    tx.run_many("rollout_insert", rows)
    tx.run_many("input_insert", inputs)
    for row in rows:
        moved(tx, None, row)
    return answer, rows


def _row(new: pb.NewRollout, ordinal: int, resources: tuple[str, int | None] | None, now: float, *, queued: bool) -> RolloutRow:
    mode = checked_mode(new.mode) if new.HasField("mode") else None
    if queued and mode == ADOPTED:
        raise UsageError(NOT_RUN)
    timeout, unresponsive, max_attempts, condition = checked_config(new.config) if new.HasField("config") else NO_CONFIG
    not_before = new.not_before if new.HasField("not_before") else None
    delayed = not_before is not None and not_before > now
    metadata = checked_object(new.metadata_json, "metadata") if new.HasField("metadata_json") else "{}"
    run, step = run_and_step(metadata, None if resources is None else resources[0])
    return RolloutRow(
        ordinal=ordinal,
        rollout_id=new.rollout_id or new_id("ro"),
        status="queuing" if queued else "preparing",
        mode=mode,
        priority=new.priority,
        position=ordinal if queued and not delayed else None,
        not_before=not_before,
        start_time=now,
        end_time=None,
        resources_id=None if resources is None else resources[0],
        resources_version=None if resources is None else resources[1],
        timeout_seconds=timeout,
        unresponsive_seconds=unresponsive,
        max_attempts=max_attempts,
        retry_condition=condition,
        attempt_count=0,
        latest_attempt_id=None,
        labels=json.dumps(dict(new.labels)) if new.labels else None,
        reason=None,
        metadata=metadata,
        run=run,
        step=step,
    )


def _current_resources(tx: Transaction, resources_id: str | None) -> tuple[str, int] | None:
    """Return (id, current version) of this set, or of the set written last if the id is None."""
    query = "resources_latest" if resources_id is None else "resources_current"
    row = first(tx.rows(query, {} if resources_id is None else {"resources_id": resources_id}))
    return None if row is None else (row[0], row[1])


def current_version(tx: Transaction, resources_id: str) -> int | None:
    """Return the current version of a set of resources; None if there is none."""
    current = _current_resources(tx, resources_id)
    return None if current is None else current[1]


def _fingerprints(request: pb.EnqueueRequest) -> list[str]:
    """Hash each rollout together with the total, so that a call with more or fewer rollouts does not match."""
    total = request.total or len(request.rollouts)
    return [hashlib.sha256(b"%d:" % total + new.SerializeToString(deterministic=True)).hexdigest()[:32] for new in request.rollouts]


def _by_key(tx: Transaction, key: str, request: pb.EnqueueRequest) -> pb.Rollouts | None:
    items = tx.rows("key_items", {"idempotency_key": key})
    if not items:
        return None
    asked = dict(enumerate(_fingerprints(request)))
    if any(asked.get(item) != fingerprint for item, _, fingerprint in items):
        raise ConflictError(
            f"idempotency key {key!r} was used for other rollouts, or for more or fewer: take another key, or send the same rollouts again"
        )
    return rollouts_by_id(tx, [rollout_id for _, rollout_id, _ in items])
