"""Changes of rollouts by callers, deletion, resources, registered services, leases, and the watchdog's sweep.

Changes of attempts are in complete.py.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.queue import lifecycle
from agl_otel.queue.answers import purge, recall, remember, rollouts_by_id
from agl_otel.queue.convert import resources_from_pb, resources_pb, split
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.checks import ROLLOUT_STATUSES, checked_config, checked_json, checked_mode, checked_object
from agl_otel.queue.operations.claim import promote
from agl_otel.queue.operations.enqueue import current_version
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import AttemptRow, ResourcesRow, RolloutRow
from agl_otel.queue.transitions import (
    ATTEMPTS,
    end_reason,
    find_rollout,
    moved,
    place_for,
    propagated,
    run_and_step,
    save_statuses,
    sync_workers,
    take_places,
    with_status,
)
from agl_otel.text import LEFT_OUT
from agl_otel.types import NamedResources, RolloutStatus, check_id, new_id

_CLEARABLE: Final = {
    "input": {},
    "mode": {"mode": None},
    "resources_id": {"resources_id": None, "resources_version": None},
    "config": {"timeout_seconds": None, "unresponsive_seconds": None, "max_attempts": 1, "retry_condition": "[]"},
    "metadata": {"metadata": None},
    "not_before": {"not_before": None},
}


def update_rollouts(tx: Transaction, request: pb.UpdateRolloutsRequest, now: float) -> pb.Rollouts:
    """Change rollouts, all or none; their attempts are not touched. Raises NotFoundError, UsageError."""
    remembered = recall(tx, request.request_id, "UpdateRollouts")
    if remembered is None:
        tx.lock_rollouts([update.rollout_id for update in request.updates])
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
    """Delete rollouts with their attempts, counters and keys; unknown ids are ignored. Returns how many existed."""
    remembered = recall(tx, request.request_id, "Delete")
    if remembered is not None:
        return pb.DeleteResponse(deleted=remembered)
    ids = {"rollout_ids": json.dumps(list(request.rollout_ids))}
    tx.lock_rollouts(request.rollout_ids)
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


# --- resources

_RESOURCES: Final = TypeAdapter[NamedResources](NamedResources)


def hide_keys(answer: pb.ResourcesList) -> None:
    """Remove providers' API keys from an answer."""
    for message in answer.resources:
        message.resources_json = _RESOURCES.dump_json(resources_from_pb(message).without_keys().resources).decode()


def put_resources(tx: Transaction, request: pb.PutResourcesRequest, now: float) -> pb.ResourcesList:
    """Store a new set of resources (version 1), or a new version of a known one."""
    remembered = recall(tx, request.request_id, "PutResources")
    if remembered is not None:
        rows = tx.rows("resources_version", {"resources_id": remembered[0], "version": remembered[1]})
        return pb.ResourcesList(resources=[resources_pb(ResourcesRow._make(row)) for row in rows], total=len(rows))
    resources_id = check_id(request.resources_id, "resources id") if request.HasField("resources_id") else new_id("rs")
    current = first(tx.rows("resources_current", {"resources_id": resources_id}))
    version, created = (1, now) if current is None else (current[1] + 1, current[2])
    try:
        given = _RESOURCES.validate_json(request.resources_json)
    except ValidationError as error:  # else every later reader would fail on it
        raise UsageError(f"the resources {resources_id} are invalid: {error.errors()[0]['msg']}") from None
    if hidden := [name for name, resource in given.items() if getattr(resource, "api_key", None) == LEFT_OUT]:
        raise UsageError(f"the resources {resources_id} hold a placeholder for the key of {', '.join(hidden)}: give the key")
    row = ResourcesRow(resources_id, version, created, now, request.resources_json)
    tx.run("resources_supersede", {"resources_id": resources_id})
    tx.run("resources_insert", {**row._asdict(), "ordinal": take_places(tx, 1), "is_current": 2 if request.aside else 1})
    remember(tx, request.request_id, "PutResources", [resources_id, version], now)
    return pb.ResourcesList(resources=[resources_pb(row)], total=1)


# --- services and leases


def announce(tx: Transaction, request: pb.AnnounceRequest, now: float, up_since: float) -> pb.DescribeResponse:
    """Register a service's addresses (for `request.seconds` if given), or deregister it."""
    if not request.service or not request.instance:
        raise UsageError("announce needs the name of a service and of its instance")
    seconds = request.seconds if request.HasField("seconds") else None
    if seconds is not None and not seconds > 0:
        raise UsageError(f"a registration must last more than 0 seconds, not {seconds:g}; `gone` deregisters")
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
    return describe(tx, now, up_since)


def describe(tx: Transaction, now: float, up_since: float) -> pb.DescribeResponse:
    """Return the addresses of the services; of several under the same name the one registered last.

    Expired registrations are left out, but only once the queue, up since `up_since`, has given the service time to renew.
    """
    answer = pb.DescribeResponse()
    for service, text in tx.rows("services_present", {"now": now, "up_since": up_since}):
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
    """Take, renew or (0 seconds) release a lease."""
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
        [(holder, expires_at)] = tx.rows("lease_of", {"name": request.name})  # another holder was faster
        return pb.LeaseResponse(held=False, holder=holder, expires_at=expires_at)
    return pb.LeaseResponse(held=True, holder=request.holder, expires_at=now + request.seconds)


# --- the watchdog

FORGOTTEN_SECONDS: Final = 86400.0  # how long expired registrations are kept


def sweep(tx: Transaction, now: float) -> int:
    """Run one round of the watchdog; return how many attempts timed out or became unresponsive."""
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
    tx.run_many("attempt_save", attempts)
    save_statuses(tx, rollouts)
    sync_workers(tx, attempts, now)
    promote(tx, now)
    purge(tx, now)
    tx.run("run_tallies_purge")
    tx.run("services_purge", {"before": now - FORGOTTEN_SECONDS})
    return len(attempts)
