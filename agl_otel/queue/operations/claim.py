"""Claims of rollouts, and the undoing of claims whose callers disconnected."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final, cast

from agl_otel.queue.answers import claims_of, recall, recall_all, remember, remember_all
from agl_otel.queue.convert import rollout_fields, split
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.checks import worker_of
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ROLLOUT_WIDTH, RolloutRow
from agl_otel.queue.transitions import ATTEMPTS, CLAIMABLE, begin_attempts, moved, sync_workers, take_places
from agl_otel.types import RUN_LABEL, RolloutStatus

MAX_CLAIM: Final = 1000
"""Most rollouts in one claim."""
MAX_CLAIM_BYTES: Final = 24 << 20
"""Most bytes of inputs in a claim of several rollouts: an answer too large to send would strand the claimed rollouts."""


def kind(request: pb.ClaimRequest) -> Hashable:
    """Return what the claims of one batch must have in common: their filter."""
    return tuple(sorted(request.modes)), tuple(sorted(request.labels.items()))


def admits(request: pb.ClaimRequest, rollout: pb.NewRollout) -> bool:
    """Whether the filter of a claim admits a rollout, as in claimable_matching."""
    labels = dict(request.labels)
    run = labels.pop(RUN_LABEL, None)
    if (request.modes and rollout.mode not in request.modes) or (run is not None and rollout.labels.get(RUN_LABEL, run) != run):
        return False
    return all(rollout.labels.get(name) == value for name, value in labels.items())


def claim_all(tx: Transaction, requests: Sequence[pb.ClaimRequest], now: float) -> list[pb.Rollouts]:
    """Serve these claims in turn with the next rollouts, each with a new attempt; without claimable rollouts nothing is changed.

    All must have the same filter (`kind`).
    """
    known = recall_all(tx, (request.request_id for request in requests), "Claim")
    answers = [claims_of(tx, known[r.request_id]) if r.request_id in known else pb.Rollouts() for r in requests]
    fresh = [(request, answer) for request, answer in zip(requests, answers, strict=True) if request.request_id not in known]
    limits = [_limit(request) for request, _ in fresh]
    if not any(limits):
        return answers
    choice = fresh[0][0]
    waiting = deque(_claimable(tx, choice, sum(limits)))
    if len(waiting) < sum(limits) and promote(tx, now):  # otherwise the watchdog promotes them within a second
        waiting = deque(_claimable(tx, choice, sum(limits)))
    if not waiting:
        return answers
    shares = [_share(waiting, limit) for limit in limits]
    claimed = [(row, worker_of(request)) for (request, _), share in zip(fresh, shares, strict=True) for row, _ in share]
    pairs = begin_attempts(tx, claimed, now)
    sync_workers(tx, (attempt for _, attempt in pairs), now, dequeued=True)
    begun = iter(pairs)
    kept: dict[str, list[str]] = {}
    for (request, answer), share in zip(fresh, shares, strict=True):
        for _, input_json in share:
            rollout, attempt = next(begun)
            answer.rollouts.add(**rollout_fields(rollout, input_json, attempt, with_token=True))
        answer.total = len(share)
        if share:
            kept[request.request_id] = [rollout.attempt.attempt_id for rollout in answer.rollouts]
    remember_all(tx, kept, "Claim", now)
    return answers


def _limit(request: pb.ClaimRequest) -> int:
    return max(min(request.limit, MAX_CLAIM), 0)


def _share(waiting: deque[tuple[RolloutRow, str]], limit: int) -> list[tuple[RolloutRow, str]]:
    """Take the next of `waiting`, as many as fit into one answer."""
    share: list[tuple[RolloutRow, str]] = []
    room = MAX_CLAIM_BYTES
    while waiting and len(share) < limit:
        room -= len(waiting[0][1])  # characters are bytes: the stored JSON is ASCII
        if share and room < 0:
            break
        share.append(waiting.popleft())
    return share


def _claimable(tx: Transaction, request: pb.ClaimRequest, limit: int) -> list[tuple[RolloutRow, str]]:
    if request.modes or request.labels:
        modes = json.dumps(list(request.modes)) if request.modes else None
        labels = dict(request.labels)
        run = labels.pop(RUN_LABEL, None)
        rows = tx.rows("claimable_matching", {"limit": limit, "modes": modes, "labels": json.dumps(labels), "run": run})
    else:
        rows = tx.rows("claimable_any", {"limit": limit})
    return [(RolloutRow._make(row[:ROLLOUT_WIDTH]), cast("str", row[ROLLOUT_WIDTH])) for row in rows]


def record_empty_claim(tx: Transaction, worker_id: str, now: float) -> None:
    """Record that a worker's claim ended without a rollout."""
    tx.run("worker_found_nothing", {"worker_id": worker_id, "now": now})


def promote(tx: Transaction, now: float) -> int:
    """Put rollouts whose not_before has passed at the end of the queue; return how many."""
    due = tx.rows("rollouts_due", {"now": now})
    if due:
        place = take_places(tx, len(due))
        tx.run_many("rollout_place", [{"ordinal": ordinal, "position": place + i} for i, (ordinal,) in enumerate(due)])
        tx.signals.claimable += len(due)
        tx.tallies[CLAIMABLE] += len(due)
    return len(due)


def release(tx: Transaction, request: pb.ReleaseRequest, now: float) -> pb.ReleaseResponse:
    """Undo claims that were not begun; the rollouts return to their old places."""
    remembered = recall(tx, request.request_id, "Release")
    if remembered is not None:
        return pb.ReleaseResponse(released=remembered)
    attempt_ids = [*request.attempt_ids]
    if request.claim_request_id:
        attempt_ids += _forget_claim(tx, request.claim_request_id, replays=1 << 30)
    released = _undo(tx, attempt_ids, now)
    remember(tx, request.request_id, "Release", released, now)
    return pb.ReleaseResponse(released=released)


def abandon(tx: Transaction, claim_request_id: str, now: float) -> int:
    """Undo a claim whose caller disconnected before the answer, unless a retry has received it meanwhile; return how many rollouts."""
    return _undo(tx, _forget_claim(tx, claim_request_id, replays=0), now)


def _forget_claim(tx: Transaction, request_id: str, *, replays: int) -> list[str]:
    row = first(tx.rows("answer_take_unreplayed", {"request_id": request_id, "method": "Claim", "replays": replays}))
    return [] if row is None else cast("list[str]", json.loads(row[0]))


def _undo(tx: Transaction, attempt_ids: list[str], now: float) -> int:
    released = 0
    for row in tx.rows("attempts_held", {"attempt_ids": json.dumps(attempt_ids)}):
        rollout, attempt = split(row)
        begun = attempt.status != "preparing" or attempt.last_heartbeat_time is not None
        if begun or rollout.latest_attempt_id != attempt.attempt_id or rollout.position is None:
            continue
        number = attempt.sequence_id - 1
        before = first(tx.rows("attempt_before", {"rollout_id": rollout.rollout_id, "sequence_id": number}))
        status: RolloutStatus = "requeuing" if number else "queuing"
        if rollout.status == "preparing":
            tx.signals.claimable += 1
        else:
            status = rollout.status
        previous = None if before is None else before[0]
        tx.run("rollout_released", {"status": status, "attempt_count": number, "latest_attempt_id": previous, "ordinal": rollout.ordinal})
        tx.run("attempt_delete", {"attempt_id": attempt.attempt_id})
        moved(tx, rollout, rollout._replace(status=status, attempt_count=number))
        tx.tallies[ATTEMPTS] -= 1
        if attempt.worker_id is not None:
            tx.run_many("worker_free", [{"worker_id": attempt.worker_id, "status": "idle", "now": now}])
        released += 1
    return released
