"""Resources: named prompts and model addresses in versions. A rollout is pinned to the version that was current at its enqueue."""

from __future__ import annotations

from typing import Final

from pydantic import TypeAdapter, ValidationError

from agl_otel.errors import UsageError
from agl_otel.queue.convert import resources_from_pb, resources_pb
from agl_otel.queue.engine import Transaction, first
from agl_otel.queue.operations.answers import recall, remember
from agl_otel.queue.operations.transitions import take_places
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.rows import ResourcesRow
from agl_otel.text import LEFT_OUT
from agl_otel.types import NamedResources, check_id, new_id

_RESOURCES: Final = TypeAdapter[NamedResources](NamedResources)


def hide_keys(answer: pb.ResourcesList) -> None:
    """Take providers' keys out of an answer."""
    for message in answer.resources:
        message.resources_json = _RESOURCES.dump_json(resources_from_pb(message).without_keys().resources).decode()


def put_resources(tx: Transaction, request: pb.PutResourcesRequest, now: float) -> pb.ResourcesList:
    """A new set (version 1), or a new version of a known one."""
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
        raise UsageError(f"the resources {resources_id} are none: {error.errors()[0]['msg']}") from None
    if hidden := [name for name, resource in given.items() if getattr(resource, "api_key", None) == LEFT_OUT]:
        raise UsageError(f"the resources {resources_id} have no key for {', '.join(hidden)}, but what is shown in its place: give the key")
    row = ResourcesRow(resources_id, version, created, now, request.resources_json)
    tx.run("resources_supersede", {"resources_id": resources_id})
    tx.run("resources_insert", {**row._asdict(), "ordinal": take_places(tx, 1), "is_current": 2 if request.aside else 1})
    remember(tx, request.request_id, "PutResources", [resources_id, version], now)
    return pb.ResourcesList(resources=[resources_pb(row)], total=1)
