"""Conversions: rows to protobuf (service), protobuf to and from the pydantic models of agl_otel.types (client).

The service converts rows directly, without pydantic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, cast

from agl_otel.errors import UsageError
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ATTEMPT_WIDTH, ROLLOUT_WIDTH, AttemptRow, ResourcesRow, RolloutRow, WorkerRow
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    AttemptLedger,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutQuery,
    Run,
    Worker,
    check_id,
)
from agl_otel.types.queries import FilterLogic, SortOrder

ITEMS: Final[dict[type[Any], str]] = {
    pb.Rollouts: "rollouts",
    pb.Attempts: "attempts",
    pb.ResourcesList: "resources",
    pb.Workers: "workers",
}
"""{type of an answer: its field with the items}, for the queries whose answers are streamed in parts."""

# --- rows to protobuf --------------------------------------------------------------------------------------------


# Fields, not messages: adding a message to another copies it, and passing None for a field costs as much as a value.
# `answer.rollouts.add(**rollout_fields(...))` builds each message once, in place.


def attempt_fields(row: AttemptRow) -> dict[str, Any]:
    """Return the fields of pb.Attempt, without the token."""
    fields: dict[str, Any] = {
        "rollout_id": row.rollout_id,
        "attempt_id": row.attempt_id,
        "sequence_id": row.sequence_id,
        "start_time": row.start_time,
        "status": row.status,
    }
    if row.end_time is not None:
        fields["end_time"] = row.end_time
    if row.worker_id is not None:
        fields["worker_id"] = row.worker_id
    if row.last_heartbeat_time is not None:
        fields["last_heartbeat_time"] = row.last_heartbeat_time
    if row.metadata is not None:
        fields["metadata_json"] = row.metadata
    if row.seals is not None:
        fields["seals"] = json.loads(row.seals)
        fields["has_seals"] = True
    if row.error is not None:
        fields["error"] = row.error
    if row.ledger is not None:
        fields["ledger_json"] = row.ledger
    if row.proxies is not None:
        fields["proxies"] = json.loads(row.proxies)
    return fields


_OPTIONAL: Final = ("end_time", "mode", "resources_id", "resources_version", "not_before", "reason")
"""Optional fields that RolloutRow, pb.Rollout and Rollout have under one name."""
_optional = attrgetter(*_OPTIONAL, "metadata")


def rollout_fields(row: RolloutRow, input_json: str, attempt: AttemptRow | None = None, *, with_token: bool = False) -> dict[str, Any]:
    """Return the fields of pb.Rollout, with its attempt if given."""
    fields: dict[str, Any] = {
        "rollout_id": row.rollout_id,
        "input_json": input_json,
        "start_time": row.start_time,
        "status": row.status,
        "config": _config_fields(row),
        "priority": row.priority,
    }
    optional = zip((*_OPTIONAL, "metadata_json"), _optional(row), strict=True)
    fields |= {name: value for name, value in optional if value is not None}
    if row.labels is not None:
        fields["labels"] = json.loads(row.labels)
    if attempt is not None:
        fields["attempt"] = attempt_fields(attempt)
        if with_token:
            fields["token"] = attempt.token
    return fields


def _config_fields(row: RolloutRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_attempts": row.max_attempts}
    if row.timeout_seconds is not None:
        fields["timeout_seconds"] = row.timeout_seconds
    if row.unresponsive_seconds is not None:
        fields["unresponsive_seconds"] = row.unresponsive_seconds
    if row.retry_condition != "[]":
        fields["retry_condition"] = row.policy.retry_condition
    return fields


def joined_fields(row: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields of pb.Rollout for a row of {rollout}, input, {attempt}; null attempt columns mean no attempt."""
    attempt = AttemptRow._make(row[ROLLOUT_WIDTH + 1 :]) if row[ROLLOUT_WIDTH + 1] is not None else None
    return rollout_fields(RolloutRow._make(row[:ROLLOUT_WIDTH]), row[ROLLOUT_WIDTH], attempt)


def rollouts_pb(rows: Iterable[tuple[Any, ...]]) -> pb.Rollouts:
    """Convert rows (as for `joined_fields`) to pb.Rollouts; the total stays 0."""
    answer = pb.Rollouts()
    for row in rows:
        answer.rollouts.add(**joined_fields(row))
    return answer


def split(row: tuple[Any, ...]) -> tuple[RolloutRow, AttemptRow]:
    """Split a row of {rollout}, {attempt}."""
    return RolloutRow._make(row[:ROLLOUT_WIDTH]), AttemptRow._make(row[ROLLOUT_WIDTH : ROLLOUT_WIDTH + ATTEMPT_WIDTH])


def worker_pb(row: WorkerRow) -> pb.Worker:
    """Convert a worker."""
    return pb.Worker(
        worker_id=row.worker_id,
        status=row.status,
        heartbeat_stats_json=row.heartbeat_stats,
        last_heartbeat_time=row.last_heartbeat_time,
        last_dequeue_time=row.last_dequeue_time,
        last_busy_time=row.last_busy_time,
        last_idle_time=row.last_idle_time,
        current_rollout_id=row.current_rollout_id,
        current_attempt_id=row.current_attempt_id,
    )


def resources_pb(row: ResourcesRow) -> pb.Resources:
    """Convert one version of a set of resources."""
    return pb.Resources(
        resources_id=row.resources_id,
        create_time=row.create_time,
        update_time=row.update_time,
        version=row.version,
        resources_json=row.resources,
    )


# --- types to protobuf -------------------------------------------------------------------------------------------


def to_json(value: object, what: str) -> str:
    """Encode `value` as JSON. Raises UsageError, which names `what`, if that is impossible."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be JSON (strings, numbers, lists, dicts): {error}") from None


def config_to_pb(config: RolloutConfig) -> pb.Config:
    """Convert a rollout's config."""
    return pb.Config(
        timeout_seconds=config.timeout_seconds,
        unresponsive_seconds=config.unresponsive_seconds,
        max_attempts=config.max_attempts,
        retry_condition=config.retry_condition,
    )


def request_to_pb(request: EnqueueRolloutRequest) -> pb.NewRollout:
    """Convert one rollout to be enqueued or started. Raises InvalidIdError, UsageError."""
    return pb.NewRollout(
        input_json=to_json(request.input, "a rollout's input"),
        mode=request.mode,
        resources_id=request.resources_id,
        config=None if request.config is None else config_to_pb(request.config),
        metadata_json=None if request.metadata is None else to_json(request.metadata, "a rollout's metadata"),
        rollout_id=None if request.rollout_id is None else check_id(request.rollout_id, "rollout id"),
        priority=request.priority,
        not_before=request.not_before,
        labels=request.labels,
    )


def rollout_query_to_pb(query: RolloutQuery) -> pb.QueryRolloutsRequest | None:
    """Convert a query of rollouts; None if nothing can match. Raises UsageError for `output_contains`, which only a store can answer."""
    if query.output_contains:
        raise UsageError("a queue does not know what models replied (output_contains): ask a store")
    lists = {"status_in": query.status_in, "mode_in": query.mode_in}
    asked = filter_to_pb(query.rollout_id_in, query.rollout_id_contains, query.filter_logic, **lists)
    if asked is None:
        return None
    if query.ended_before is not None:
        asked.ended_before = query.ended_before
    if query.run is not None:
        asked.run = query.run
    if query.input_contains:
        asked.input_contains = query.input_contains
    asked.attempts_from = query.attempts_from
    return pb.QueryRolloutsRequest(filter=asked, page=page_to_pb(query.sort_by, query.sort_order, query.limit, query.offset))


def filter_to_pb(ids: Sequence[str] | None, contains: str | None, logic: FilterLogic, **lists: Sequence[str] | None) -> pb.Filter | None:
    """Build a filter; None if nothing can match (an empty list of values matches nothing)."""
    any_of = logic == "or"
    given = [condition for condition in (ids, contains, *lists.values()) if condition is not None]
    empty = [condition for condition in given if not isinstance(condition, str) and not condition]
    if empty and (not any_of or len(empty) == len(given)):
        return None
    asked = pb.Filter(id_in=ids or (), has_id_in=ids is not None, id_contains=contains, any=any_of)
    for name, values in lists.items():
        getattr(asked, name).extend(values or ())
    return asked


def page_to_pb(sort_by: str | None, sort_order: SortOrder, limit: int, offset: int) -> pb.Page:
    """Build a page. A limit of 0 becomes 1, since 0 means unlimited on the wire and the total is needed all the same."""
    return pb.Page(sort_by=sort_by or "", descending=sort_order == "desc", limit=limit or 1, offset=offset)


# --- protobuf to types -------------------------------------------------------------------------------------------


def _given(message: Any, *names: str) -> dict[str, Any]:
    """Return the optional fields of `message` that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _loaded(message: Any, name: str) -> dict[str, Any] | None:
    return cast("dict[str, Any]", json.loads(getattr(message, name))) if message.HasField(name) else None


def attempt_from_pb(message: pb.Attempt) -> Attempt:
    """Convert an attempt."""
    return Attempt(
        rollout_id=message.rollout_id,
        attempt_id=message.attempt_id,
        sequence_id=message.sequence_id,
        start_time=message.start_time,
        status=cast("Any", message.status),
        metadata=_loaded(message, "metadata_json"),
        seals=dict(message.seals) if message.has_seals else None,
        ledger=AttemptLedger.model_validate_json(message.ledger_json) if message.HasField("ledger_json") else None,
        proxies=dict(message.proxies) or None,
        **_given(message, "end_time", "worker_id", "last_heartbeat_time", "error"),
    )


def rollout_from_pb(message: pb.Rollout) -> Rollout | AttemptedRollout:
    """Convert a rollout; an AttemptedRollout if it has an attempt."""
    config = message.config
    values: dict[str, Any] = {
        "rollout_id": message.rollout_id,
        "input": json.loads(message.input_json),
        "start_time": message.start_time,
        "status": message.status,
        "config": RolloutConfig(
            max_attempts=config.max_attempts or 1,
            retry_condition=cast("Any", list(config.retry_condition)),
            **_given(config, "timeout_seconds", "unresponsive_seconds"),
        ),
        "metadata": _loaded(message, "metadata_json"),
        "priority": message.priority,
        "labels": dict(message.labels) or None,
        **_given(message, *_OPTIONAL),
    }
    if message.HasField("attempt"):
        return AttemptedRollout(**values, attempt=attempt_from_pb(message.attempt), **_given(message, "token"))
    return Rollout(**values)


def attempted_from_pb(message: pb.Rollout) -> AttemptedRollout:
    """Convert a rollout that must have an attempt."""
    rollout = rollout_from_pb(message)
    assert isinstance(rollout, AttemptedRollout), f"the queue answered rollout {message.rollout_id} without an attempt"
    return rollout


def worker_from_pb(message: pb.Worker) -> Worker:
    """Convert a worker."""
    times = ("last_heartbeat_time", "last_dequeue_time", "last_busy_time", "last_idle_time", "current_rollout_id", "current_attempt_id")
    return Worker(
        worker_id=message.worker_id,
        status=cast("Any", message.status),
        heartbeat_stats=_loaded(message, "heartbeat_stats_json"),
        **_given(message, *times),
    )


def resources_from_pb(message: pb.Resources) -> ResourcesUpdate:
    """Convert one version of a set of resources."""
    return ResourcesUpdate(
        resources_id=message.resources_id,
        create_time=message.create_time,
        update_time=message.update_time,
        version=message.version,
        resources=json.loads(message.resources_json),
    )


def reachable(address: str, dialled: str) -> str:
    """Return `address` as reachable by a client that connected to host `dialled`: it replaces a wildcard or loopback host."""
    scheme, separator, rest = address.rpartition("://")
    host, colon, port = rest.rpartition(":")
    far = dialled not in ("127.0.0.1", "localhost", "[::1]")
    if host in ("0.0.0.0", "[::]") or (far and host in ("127.0.0.1", "localhost", "[::1]")):
        host = dialled
    return f"{scheme}{separator}{host}{colon}{port}"


def addresses_reachable(addresses: Mapping[str, str], dialled: str) -> dict[str, str]:
    """Apply `reachable` to all addresses."""
    return {name: reachable(address, dialled) for name, address in addresses.items()}


def runs_from_pb(answer: pb.Runs) -> list[Run]:
    """Convert runs; the one that began last comes first."""
    parts: dict[str, list[pb.RunPart]] = {}
    for part in answer.parts:
        parts.setdefault(part.run, []).append(part)
    return sorted((_run(run, own) for run, own in parts.items()), key=lambda run: run.start_time, reverse=True)


def _run(run_id: str, parts: list[pb.RunPart]) -> Run:
    by_status: Counter[str] = Counter()
    by_mode: Counter[str] = Counter()
    for part in parts:
        by_status[part.status] += part.rollouts
        by_mode[part.mode] += part.rollouts
    return Run.model_validate(
        {
            "run_id": run_id,
            "rollouts": by_status.total(),
            "by_status": dict(by_status),
            "by_mode": dict(by_mode),
            "attempts": sum(part.attempts for part in parts),
            "start_time": min(part.first_start for part in parts),
            "end_time": max((part.last_end for part in parts if part.HasField("last_end")), default=None),
            "last_step": max((part.last_step for part in parts if part.HasField("last_step")), default=None),
        }
    )
