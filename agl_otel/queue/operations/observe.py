"""Calls of collectors, proxies and workers: heartbeats, span numbers, and which proxies forward calls.

An unknown rollout is no error in any of them.
"""

from __future__ import annotations

import json
from typing import Final

from agl_otel.errors import UsageError
from agl_otel.queue import lifecycle
from agl_otel.queue.answers import recall, remember
from agl_otel.queue.convert import split
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations.checks import checked_object
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, RolloutRow
from agl_otel.queue.transitions import moved, sync_workers

MAX_SEQUENCE: Final = 1 << 53  # bound of what a client may set (contracts §5); numbers taken later stay within 63 bits
MAX_TAKEN: Final = 1 << 31  # numbers in one request


def observe(tx: Transaction, request: pb.ObserveRequest, now: float) -> pb.ObserveResponse:
    """Record that spans of attempts were received: a heartbeat, and with `spans` > 0 the changes of lifecycle.observed."""
    ahead = request.sent_at - now if request.HasField("sent_at") else 0.0  # offset of the sender's clock
    merged: dict[tuple[str, str], tuple[int, float]] = {}
    for seen in request.observations:
        key = (seen.rollout_id, seen.attempt_id)
        spans, received = merged.get(key, (0, 0.0))
        merged[key] = (spans + seen.spans, max(received, min(seen.received_at - ahead if seen.received_at else now, now)))
    ids = json.dumps([attempt_id for _, attempt_id in merged])
    for row in tx.rows("attempts_held", {"attempt_ids": ids}):
        rollout, attempt = split(row)
        if (seen := merged.get((rollout.rollout_id, attempt.attempt_id))) is not None:
            _observe(tx, rollout, attempt, *seen, now)
    return pb.ObserveResponse()


def _observe(tx: Transaction, rollout: RolloutRow, attempt: AttemptRow, spans: int, received_at: float, now: float) -> None:
    latest = rollout.latest_attempt_id == attempt.attempt_id
    attempt_status, rollout_status = attempt.status, rollout.status
    if spans > 0:
        attempt_status, rollout_status = lifecycle.observed(attempt.status, rollout.status, latest=latest)
    heartbeat = max(received_at, attempt.last_heartbeat_time or 0.0)
    if attempt_status != attempt.status or heartbeat != attempt.last_heartbeat_time:
        tx.run("attempt_seen", {"status": attempt_status, "last_heartbeat_time": heartbeat, "attempt_id": attempt.attempt_id})
    if rollout_status != rollout.status:
        tx.run("rollout_running", {"ordinal": rollout.ordinal})
        moved(tx, rollout, rollout._replace(status=rollout_status))
    if attempt_status != attempt.status and attempt.status == "unresponsive":
        sync_workers(tx, [attempt._replace(status=attempt_status)], now)


def witness(tx: Transaction, request: pb.WitnessRequest, now: float) -> pb.WitnessResponse:
    """Add the markers of proxies that are about to forward calls to the known proxies of each attempt."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for seen in request.witnesses:
        found.setdefault((seen.rollout_id, seen.attempt_id), {})[seen.marker] = seen.address
    ids = json.dumps([attempt_id for _, attempt_id in found])
    for row in tx.rows("attempts_held", {"attempt_ids": ids}):
        rollout, attempt = split(row)
        known = json.loads(attempt.proxies) if attempt.proxies else {}
        new = found.get((rollout.rollout_id, attempt.attempt_id), {})
        if not new.items() <= known.items():
            tx.run("attempt_witnessed", {"proxies": json.dumps(known | new), "attempt_id": attempt.attempt_id})
    return pb.WitnessResponse()


def heartbeat(tx: Transaction, request: pb.HeartbeatRequest, now: float) -> pb.HeartbeatResponse:
    """Store a worker's heartbeat, also as one of its attempts; return which of them it must end, including those that were deleted."""
    stats = checked_object(request.stats_json, "statistics") if request.HasField("stats_json") else None
    tx.run("worker_heartbeat", {"worker_id": request.worker_id, "stats": stats, "now": now})
    if not request.attempt_ids:
        return pb.HeartbeatResponse()
    alive: set[str] = set()
    for row in tx.rows("attempts_held", {"attempt_ids": json.dumps(list(request.attempt_ids))}):
        rollout, attempt = split(row)
        latest = rollout.latest_attempt_id == attempt.attempt_id
        if not lifecycle.must_end(attempt.status, rollout.status, latest=latest):
            alive.add(attempt.attempt_id)
    if alive:
        tx.run("attempts_alive", {"attempt_ids": json.dumps([*alive]), "now": now})
    return pb.HeartbeatResponse(cancelled=[attempt_id for attempt_id in request.attempt_ids if attempt_id not in alive])


def take_sequence(tx: Transaction, request: pb.TakeSequenceRequest, now: float) -> pb.TakeSequenceResponse:
    """Reserve for each request `count` new numbers of its rollout (from 1) above `at_least`; return the first (0 for an empty rollout id).

    Raises UsageError if a number exceeds its bound.
    """
    for asked in request.requests:
        if asked.at_least >= MAX_SEQUENCE or asked.count > MAX_TAKEN:
            raise UsageError(
                f"rollout {asked.rollout_id!r:.140} is asked for {asked.count} numbers above {asked.at_least}: "
                f"at most {MAX_TAKEN} at once, above less than {MAX_SEQUENCE}"
            )
    remembered = recall(tx, request.request_id, "TakeSequence")
    if remembered is None:
        taken = {i: _take(tx, request.requests[i]) for i in _in_order(request)}
        remembered = [taken[i] for i in range(len(request.requests))]
        remember(tx, request.request_id, "TakeSequence", remembered, now)
    return pb.TakeSequenceResponse(first=remembered)


def _in_order(request: pb.TakeSequenceRequest) -> list[int]:
    """Sort by rollout id, so that two calls for the same rollouts cannot deadlock."""
    return sorted(range(len(request.requests)), key=lambda i: request.requests[i].rollout_id)


def _take(tx: Transaction, asked: pb.SequenceRequest) -> int:
    if not asked.rollout_id:
        return 0
    count = max(asked.count, 0)
    params = {"rollout_id": asked.rollout_id, "count": count, "at_least": asked.at_least}
    return int(tx.rows("sequence_take", params)[0][0]) - count + 1
