"""Workers' heartbeats, the services of a stack, leases, statistics."""

from __future__ import annotations

import json
from typing import cast

from agl_otel.errors import UsageError
from agl_otel.queue import lifecycle
from agl_otel.queue.convert import split
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.enqueue import checked_object
from agl_otel.queue.operations.tallies import ATTEMPTS, CLAIMABLE, all_tallies, rollouts_by_status
from agl_otel.queue.proto import queue_pb2 as pb


def heartbeat(tx: Transaction, request: pb.HeartbeatRequest, now: float) -> pb.HeartbeatResponse:
    """Stamp a worker; answer which of its attempts to end. An attempt that is gone altogether is to be ended too."""
    stats = checked_object(request.stats_json, "statistics") if request.HasField("stats_json") else None
    tx.run("worker_heartbeat", {"worker_id": request.worker_id, "stats": stats, "now": now})
    if not request.attempt_ids:
        return pb.HeartbeatResponse()
    alive: set[str] = set()
    for row in tx.rows("attempts_by_id", {"attempt_ids": json.dumps(list(request.attempt_ids))}):
        rollout, attempt = split(row)
        latest = rollout.latest_attempt_id == attempt.attempt_id
        if not lifecycle.must_end(attempt.status, rollout.status, latest=latest):
            alive.add(attempt.attempt_id)
    return pb.HeartbeatResponse(cancelled=[attempt_id for attempt_id in request.attempt_ids if attempt_id not in alive])


def announce(tx: Transaction, request: pb.AnnounceRequest, now: float, heard_since: float) -> pb.DescribeResponse:
    """A service says where it can be reached and for how long that holds, or that it has gone."""
    if not request.service or not request.instance:
        raise UsageError("announce needs the name of a service and of its instance")
    seconds = request.seconds if request.HasField("seconds") else None
    if seconds is not None and not seconds > 0:
        raise UsageError(f"an announcement must hold for more than 0 seconds, not {seconds:g}; `gone` takes it back")
    addresses = json.dumps(dict(request.addresses))
    tx.run(
        "service_announce",
        {
            "service": request.service,
            "instance": request.instance,
            "addresses": addresses,
            "now": now,
            "gone": int(request.gone),
            "seconds": seconds,
        },
    )
    return describe(tx, now, heard_since)


def describe(tx: Transaction, now: float, heard_since: float) -> pb.DescribeResponse:
    """Where the services are; of several that give the same address the one that spoke last.

    An announcement that has expired is left out, but not before the queue, up since `heard_since`, gave its service the time to renew it.
    """
    answer = pb.DescribeResponse()
    for service, text in tx.rows("services_present", {"now": now, "heard_since": heard_since}):
        addresses = cast("dict[str, str]", json.loads(text))
        for name, address in addresses.items():
            answer.addresses[name] = address
        if service == "collector" and "collector_http" in addresses:
            answer.collectors.append(addresses["collector_http"])
        if "clickhouse" in addresses and addresses["clickhouse"] not in answer.clickhouses:
            answer.clickhouses.append(addresses["clickhouse"])
        if service == "proxy" and "proxy" in addresses:
            answer.proxies.append(addresses["proxy"])
    return answer


def lease(tx: Transaction, request: pb.LeaseRequest, now: float) -> pb.LeaseResponse:
    """Take, prolong or (0 seconds) give back a lease."""
    if not request.name or not request.holder:
        raise UsageError("a lease needs a name and a holder")
    row = first(tx.rows("lease_of", {"name": request.name}))
    if row is not None and row[0] != request.holder and row[1] > now:
        return pb.LeaseResponse(held=False, holder=row[0], expires_at=row[1])
    if request.seconds <= 0:
        tx.run("lease_drop", {"name": request.name, "holder": request.holder})
        return pb.LeaseResponse(held=False)
    given = {"name": request.name, "holder": request.holder, "expires_at": now + request.seconds, "now": now}
    if not tx.changed("lease_set", given):
        [(holder, expires_at)] = tx.rows("lease_of", {"name": request.name})  # somebody was faster
        return pb.LeaseResponse(held=False, holder=holder, expires_at=expires_at)
    return pb.LeaseResponse(held=True, holder=request.holder, expires_at=now + request.seconds)


def statistics(tx: Transaction, now: float) -> pb.StatisticsResponse:
    """What there is."""
    tallies = all_tallies(tx)
    by_status = rollouts_by_status(tallies)
    oldest = tx.rows("claimable_oldest")[0][0]
    return pb.StatisticsResponse(
        rollouts_by_status=by_status,
        total_rollouts=sum(by_status.values()),
        total_attempts=tallies.get(ATTEMPTS, 0),
        total_resources=tx.rows("resources_count")[0][0],
        total_workers=tx.rows("workers_count")[0][0],
        claimable=tallies.get(CLAIMABLE, 0),
        oldest_claimable_age_seconds=None if oldest is None else max(0.0, now - oldest),
    )
