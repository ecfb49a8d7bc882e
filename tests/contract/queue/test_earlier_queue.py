"""A client of this release with a queue of an earlier one: ignored filters are detected, not taken for an answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from agl_otel.errors import UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue

UNKNOWN = b"\xfa\x3f\x05later"  # field 1023, of which no release knows


@contextlib.asynccontextmanager
async def earlier(target: str, later: tuple[str, ...]) -> AsyncGenerator[QueueClient]:
    """A client of a queue before the real one that reads and says what a release without the filters `later` does, on the wire."""
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(target) as channel:

        async def query(request: bytes, _: Any) -> AsyncIterator[bytes]:
            asked = pb.QueryRolloutsRequest.FromString(request)
            for name in later:
                asked.filter.ClearField(name)  # pyright: ignore[reportArgumentType]  # names of its fields
            async for part in channel.unary_stream("/agl.queue.v1.Queue/StreamRollouts", None, None)(asked.SerializeToString()):
                answer = pb.Rollouts.FromString(part)
                for name in set(later) & set(answer.filters):
                    answer.filters.remove(name)
                yield answer.SerializeToString()

        async def describe(request: bytes, _: Any) -> bytes:
            return await channel.unary_unary("/agl.queue.v1.Queue/Describe", None, None)(request)

        handlers = {
            "StreamRollouts": grpc.unary_stream_rpc_method_handler(query),
            "Describe": grpc.unary_unary_rpc_method_handler(describe),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("agl.queue.v1.Queue", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with QueueClient(f"127.0.0.1:{port}") as client:
                yield client
        finally:
            await server.stop(None)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"input_contains": "a"}, "input_contains"),
        ({"attempts_from": 2}, "attempts_from"),
        ({"run": "r"}, "run"),
        ({"ended_before": 1.0}, "ended_before"),
        ({"ended_before": 1.0, "run": "r", "status_in": ["failed"]}, "ended_before, run"),
    ],
)
async def test_a_filter_that_an_earlier_queue_ignores_is_refused(queue: LocalQueue, asked: dict[str, Any], named: str) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input="a"), EnqueueRolloutRequest(input="b")])
    async with earlier(queue.client.address, ("ended_before", "run", "input_contains", "attempts_from")) as client:
        assert len(await client.query_rollouts(mode_in=["train"], rollout_id_contains="ro")) == 0
        assert len(await client.query_rollouts(limit=1)) == 1
        with pytest.raises(UsageError, match=f"{named} had not been asked for: update it"):
            await client.query_rollouts(**asked)


async def test_a_queue_reports_the_filters_that_it_applied(queue: LocalQueue) -> None:
    """A later release's client that sends an unknown filter sees from every part of the answer that it was not applied."""
    await queue.client.enqueue([EnqueueRolloutRequest(input="a")])
    asked = pb.QueryRolloutsRequest(filter=pb.Filter(run="r", attempts_from=1))
    asked.filter.MergeFromString(UNKNOWN)
    async with grpc.aio.insecure_channel(queue.client.address) as channel:
        parts = [part async for part in channel.unary_stream("/agl.queue.v1.Queue/StreamRollouts", None, None)(asked.SerializeToString())]
    assert [list(pb.Rollouts.FromString(part).filters) for part in parts] == [["run", "attempts_from"]]
