"""Rows to protobuf for the service, protobuf to the pydantic models of types.py for the client. No detour by pydantic in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from agl_otel.errors import UsageError
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ATTEMPT_WIDTH, ROLLOUT_WIDTH, AttemptRow, ResourcesRow, RolloutRow, WorkerRow
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Worker,
)

# --- rows to protobuf --------------------------------------------------------------------------------------------


def attempt_pb(row: AttemptRow) -> pb.Attempt:
    """An attempt without its token."""
    return pb.Attempt(
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        sequence_id=row.sequence_id,
        start_time=row.start_time,
        end_time=row.end_time,
        status=row.status,
        worker_id=row.worker_id,
        last_heartbeat_time=row.last_heartbeat_time,
        metadata_json=row.metadata,
        seals=None if row.seals is None else json.loads(row.seals),
        has_seals=row.seals is not None,
        error=row.error,
    )


def rollout_pb(row: RolloutRow, input_json: str, attempt: AttemptRow | None = None, *, with_token: bool = False) -> pb.Rollout:
    """A rollout, with an attempt where there is one."""
    return pb.Rollout(
        rollout_id=row.rollout_id,
        input_json=input_json,
        start_time=row.start_time,
        end_time=row.end_time,
        mode=row.mode,
        resources_id=row.resources_id,
        resources_version=row.resources_version,
        status=row.status,
        config=pb.Config(
            timeout_seconds=row.timeout_seconds,
            unresponsive_seconds=row.unresponsive_seconds,
            max_attempts=row.max_attempts,
            retry_condition=row.policy.retry_condition,
        ),
        metadata_json=row.metadata,
        priority=row.priority,
        not_before=row.not_before,
        attempt=None if attempt is None else attempt_pb(attempt),
        token=attempt.token if with_token and attempt is not None else None,
        labels=None if row.labels is None else json.loads(row.labels),
        reason=row.reason,
    )


def joined_pb(row: tuple[Any, ...], *, with_token: bool = False) -> pb.Rollout:
    """A row of {rollout}, input, {attempt}; the attempt's columns are null where there is none."""
    attempt = AttemptRow._make(row[ROLLOUT_WIDTH + 1 :]) if row[ROLLOUT_WIDTH + 1] is not None else None
    return rollout_pb(RolloutRow._make(row[:ROLLOUT_WIDTH]), row[ROLLOUT_WIDTH], attempt, with_token=with_token)


def split(row: tuple[Any, ...]) -> tuple[RolloutRow, AttemptRow]:
    """A row of {rollout}, {attempt}."""
    return RolloutRow._make(row[:ROLLOUT_WIDTH]), AttemptRow._make(row[ROLLOUT_WIDTH : ROLLOUT_WIDTH + ATTEMPT_WIDTH])


def worker_pb(row: WorkerRow) -> pb.Worker:
    """A worker."""
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
    """One version of a set of resources."""
    return pb.Resources(
        resources_id=row.resources_id,
        create_time=row.create_time,
        update_time=row.update_time,
        version=row.version,
        resources_json=row.resources,
    )


# --- types to protobuf -------------------------------------------------------------------------------------------


def to_json(value: object, what: str) -> str:
    """`value` as JSON text. Raises UsageError that names `what` where it is not JSON."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be JSON (strings, numbers, lists, dicts): {error}") from None


def config_to_pb(config: RolloutConfig) -> pb.Config:
    """A rollout's config."""
    return pb.Config(
        timeout_seconds=config.timeout_seconds,
        unresponsive_seconds=config.unresponsive_seconds,
        max_attempts=config.max_attempts,
        retry_condition=config.retry_condition,
    )


def request_to_pb(request: EnqueueRolloutRequest) -> pb.NewRollout:
    """One rollout to be enqueued or started."""
    return pb.NewRollout(
        input_json=to_json(request.input, "a rollout's input"),
        mode=request.mode,
        resources_id=request.resources_id,
        config=None if request.config is None else config_to_pb(request.config),
        metadata_json=None if request.metadata is None else to_json(request.metadata, "a rollout's metadata"),
        rollout_id=request.rollout_id,
        priority=request.priority,
        not_before=request.not_before,
        labels=request.labels,
    )


# --- protobuf to types -------------------------------------------------------------------------------------------


def _given(message: Any, *names: str) -> dict[str, Any]:
    """The optional fields of `message` that are there."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _loaded(message: Any, name: str) -> dict[str, Any] | None:
    return cast("dict[str, Any]", json.loads(getattr(message, name))) if message.HasField(name) else None


def attempt_from_pb(message: pb.Attempt) -> Attempt:
    """An attempt."""
    return Attempt(
        rollout_id=message.rollout_id,
        attempt_id=message.attempt_id,
        sequence_id=message.sequence_id,
        start_time=message.start_time,
        status=cast("Any", message.status),
        metadata=_loaded(message, "metadata_json"),
        seals=dict(message.seals) if message.has_seals else None,
        **_given(message, "end_time", "worker_id", "last_heartbeat_time", "error"),
    )


def rollout_from_pb(message: pb.Rollout) -> Rollout | AttemptedRollout:
    """A rollout; an AttemptedRollout where it has an attempt."""
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
        **_given(message, "end_time", "mode", "resources_id", "resources_version", "not_before", "reason"),
    }
    if message.HasField("attempt"):
        return AttemptedRollout(**values, attempt=attempt_from_pb(message.attempt), **_given(message, "token"))
    return Rollout(**values)


def attempted_from_pb(message: pb.Rollout) -> AttemptedRollout:
    """A rollout that must have an attempt."""
    rollout = rollout_from_pb(message)
    assert isinstance(rollout, AttemptedRollout), f"the queue answered rollout {message.rollout_id} without an attempt"
    return rollout


def worker_from_pb(message: pb.Worker) -> Worker:
    """A worker."""
    times = ("last_heartbeat_time", "last_dequeue_time", "last_busy_time", "last_idle_time", "current_rollout_id", "current_attempt_id")
    return Worker(
        worker_id=message.worker_id,
        status=cast("Any", message.status),
        heartbeat_stats=_loaded(message, "heartbeat_stats_json"),
        **_given(message, *times),
    )


def resources_from_pb(message: pb.Resources) -> ResourcesUpdate:
    """One version of a set of resources."""
    return ResourcesUpdate(
        resources_id=message.resources_id,
        create_time=message.create_time,
        update_time=message.update_time,
        version=message.version,
        resources=json.loads(message.resources_json),
    )


def reachable(address: str, dialled: str) -> str:
    """`address` as somebody who reached the queue at host `dialled` can reach it: a wildcard or loopback host gives way to it."""
    scheme, separator, rest = address.rpartition("://")
    host, colon, port = rest.rpartition(":")
    far = dialled not in ("127.0.0.1", "localhost", "[::1]")
    if host in ("0.0.0.0", "[::]") or (far and host in ("127.0.0.1", "localhost", "[::1]")):
        host = dialled
    return f"{scheme}{separator}{host}{colon}{port}"


def addresses_reachable(addresses: Mapping[str, str], dialled: str) -> dict[str, str]:
    """All of `addresses`, see `reachable`."""
    return {name: reachable(address, dialled) for name, address in addresses.items()}
