"""Claiming rollouts, and giving back claims that nobody got."""

from __future__ import annotations

import json
from typing import Final, cast

from agl_otel.queue.convert import rollout_fields, split
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.answers import claimed_again, recall, remember
from agl_otel.queue.operations.tallies import ATTEMPTS, CLAIMABLE, moved
from agl_otel.queue.operations.transitions import begin_attempts, sync_worker, take_places
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ROLLOUT_WIDTH, RolloutRow
from agl_otel.types import RolloutStatus

MAX_CLAIM: Final = 1000
"""Rollouts in one claim, whatever the caller asks for."""
MAX_CLAIM_BYTES: Final = 24 << 20
"""Of inputs in one claim, after its first: a message that is too large would strand what it claimed."""


def claim(tx: Transaction, request: pb.ClaimRequest, now: float) -> pb.Rollouts:
    """The next rollouts, each with a new attempt; empty where there is none (then nothing has changed)."""
    remembered = recall(tx, request.request_id, "Claim")
    if remembered is not None:
        return claimed_again(tx, remembered)
    found = _claimable(tx, request)
    if len(found) < request.limit and promote(tx, now):  # otherwise the watchdog does it, within a second
        found = _claimable(tx, request)
    if not found:
        return pb.Rollouts()
    worker_id = request.worker_id if request.HasField("worker_id") else None
    pairs = begin_attempts(tx, [row for row, _ in found], worker_id, now)
    sync_worker(tx, pairs[-1][1], now, dequeued=True)
    remember(tx, request.request_id, "Claim", [attempt.attempt_id for _, attempt in pairs], now)
    answer = pb.Rollouts(total=len(pairs))
    for (rollout, attempt), (_, input_json) in zip(pairs, found, strict=True):
        answer.rollouts.add(**rollout_fields(rollout, input_json, attempt, with_token=True))
    return answer


def _claimable(tx: Transaction, request: pb.ClaimRequest) -> list[tuple[RolloutRow, str]]:
    limit = min(request.limit, MAX_CLAIM)
    if limit <= 0:
        return []
    if request.modes or request.labels:
        modes = json.dumps(list(request.modes)) if request.modes else None
        rows = tx.rows("claimable_matching", {"limit": limit, "modes": modes, "labels": json.dumps(dict(request.labels))})
    else:
        rows = tx.rows("claimable_any", {"limit": limit})
    found = [(RolloutRow._make(row[:ROLLOUT_WIDTH]), cast("str", row[ROLLOUT_WIDTH])) for row in rows]
    room = MAX_CLAIM_BYTES
    for index, (_, input_json) in enumerate(found):
        room -= len(input_json)  # characters, and JSON text of ours is ASCII
        if room < 0:
            return found[: max(index, 1)]
    return found


def found_nothing(tx: Transaction, worker_id: str, now: float) -> None:
    """A worker's claim ended without a rollout."""
    tx.run("worker_found_nothing", {"worker_id": worker_id, "now": now})


def promote(tx: Transaction, now: float) -> int:
    """Give rollouts whose not_before has come a place at the end of the queue; answers how many."""
    due = tx.rows("rollouts_due", {"now": now})
    if due:
        place = take_places(tx, len(due))
        tx.run_many("rollout_place", [{"ordinal": ordinal, "position": place + i} for i, (ordinal,) in enumerate(due)])
        tx.signals.claimable += len(due)
        tx.tallies[CLAIMABLE] += len(due)
    return len(due)


def release(tx: Transaction, request: pb.ReleaseRequest, now: float) -> pb.ReleaseResponse:
    """Undo claims that were not begun; the rollouts get their old places back."""
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
    """Undo a claim whose caller went away before the answer, unless a retry has got the answer meanwhile."""
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
            tx.run("worker_free", {"worker_id": attempt.worker_id, "status": "idle", "now": now})
        released += 1
    return released
