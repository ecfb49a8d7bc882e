"""A message holds so many items at most, whatever they are: an empty rollout takes two bytes on the wire and a row in the queue."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.queue import bounds
from agl_otel.queue.client import AttemptUpdate, Observation, RolloutUpdate, Witness
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue

METHODS = pb.DESCRIPTOR.services_by_name["Queue"].methods_by_name


def fill(message: Any, field: Any, count: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is None:
        values.extend(["x"] * count)
    elif field.message_type.GetOptions().map_entry:
        values.update({str(number): "x" for number in range(count)})
    else:
        for _ in range(count):
            values.add()


def places() -> list[tuple[str, tuple[str, ...]]]:
    """Every list of every request: (method, names of the fields that lead to it)."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for method in METHODS.values():
        for field in method.input_type.fields:
            inner = field.message_type.fields if field.message_type is not None and not field.is_repeated else ()
            found += [(method.name, (field.name,))] if field.is_repeated else []
            found += [(method.name, (field.name, each.name)) for each in inner if each.is_repeated]
    return found


async def refusal(queue: LocalQueue, method: str, request: Any) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(queue.client.address) as channel:
        call = getattr(queue_pb2_grpc.QueueStub(channel), method)(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if METHODS[method].server_streaming:
                _ = [answer async for answer in call]
            else:
                await call
    return caught.value


async def test_every_list_of_every_request_has_an_end(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_ITEMS", 10)
    monkeypatch.setattr(bounds, "MAX_IDS", 10)
    assert {("Enqueue", ("rollouts",)), ("Wait", ("rollout_ids",)), ("StreamWorkers", ("filter", "id_in"))} < set(places())
    for method, path in places():
        request: Any = message_factory.GetMessageClass(METHODS[method].input_type)()
        *outer, name = path
        holder = getattr(request, outer[0]) if outer else request
        fill(holder, holder.DESCRIPTOR.fields_by_name[name], 11)
        error = await refusal(queue, method, request)
        details = error.details() or ""
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, path, error)
        assert name in details and "11" in details and "in several" in details, (method, path, details)


async def test_a_message_of_too_many_rollouts_enqueues_none(queue: LocalQueue) -> None:
    request = pb.EnqueueRequest(request_id="r", rollouts=[pb.NewRollout()] * (bounds.MAX_ITEMS + 1))
    assert request.ByteSize() < 256 << 10
    error = await refusal(queue, "Enqueue", request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await queue.client.query_rollouts(limit=1)).total == 0


async def test_the_client_sends_many_in_several_messages(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    client = queue.client
    monkeypatch.setattr("agl_otel.queue.calls.PART_ROLLOUTS", 2)
    monkeypatch.setattr(bounds, "MAX_ITEMS", 2)
    ids = [rollout.rollout_id for rollout in await client.enqueue([EnqueueRolloutRequest(input=n) for n in range(5)])]
    claimed = await client.claim(5)
    assert await client.release(claimed) == 5
    keys = [(claim.rollout_id, claim.attempt.attempt_id) for claim in await client.claim(5)]
    await client.observe([Observation(*key, 1, 1.0) for key in keys])
    await client.witness([Witness(*key, "marker", "127.0.0.1:1") for key in keys])
    assert await client.take_sequence([(rollout_id, 3, 0) for rollout_id in [*ids, *ids]]) == [1] * 5 + [4] * 5
    ends = [AttemptUpdate(rollout_id=r, attempt_id=a if n != 3 else "none", status="succeeded") for n, (r, a) in enumerate(keys)]
    outcomes = await client.report(ends)
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [NotFoundError, type(None)]
    assert [begun.attempt.sequence_id for begun in await client.start_attempt(ids)] == [2] * 5
    with pytest.raises(UsageError, match="in several"):  # all or none
        await client.update_rollouts([RolloutUpdate(rollout_id=each, status="cancelled") for each in ids])
    assert await client.delete(ids) == 5
