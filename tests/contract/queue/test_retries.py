"""A retry after a lost answer has no second effect; calls to a queue that is down are retried."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from agl_otel.errors import SettingsError, UnavailableError, UsageError
from agl_otel.queue.calls import Calls
from agl_otel.queue.client import QueueClient, RolloutUpdate
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue

TASK = pb.NewRollout(input_json="1")


@pytest.fixture
async def calls(queue: LocalQueue) -> AsyncIterator[Calls]:
    calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=60)
    yield calls
    await calls.close()


async def twice(calls: Calls, method: str, request: object, answer: type[object]) -> tuple[object, object]:
    return await calls.call(method, request, answer), await calls.call(method, request, answer)


async def test_an_enqueue_that_is_repeated_makes_its_rollouts_once(queue: LocalQueue, calls: Calls) -> None:
    first, again = await twice(calls, "Enqueue", pb.EnqueueRequest(rollouts=[TASK, TASK], request_id="r"), pb.Rollouts)
    assert first == again
    assert len(await queue.client.query_rollouts()) == 2


async def test_a_claim_that_is_repeated_gets_the_same_rollouts_and_token(queue: LocalQueue, calls: Calls) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=i) for i in range(3)])
    request = pb.ClaimRequest(limit=2, request_id="r")
    first = await calls.call("Claim", request, pb.Rollouts)
    again = await calls.call("Claim", request, pb.Rollouts)
    assert [(r.rollout_id, r.attempt.attempt_id, r.token) for r in first.rollouts] == [
        (r.rollout_id, r.attempt.attempt_id, r.token) for r in again.rollouts
    ]
    assert all(r.token for r in first.rollouts)
    assert (await queue.client.statistics())["claimable"] == 1


async def test_a_repeated_start_starts_once_and_returns_no_other_token(queue: LocalQueue, calls: Calls) -> None:
    [other] = await queue.client.start([EnqueueRolloutRequest(input=1, rollout_id="mine")])
    request = pb.StartRequest(rollouts=[TASK, pb.NewRollout(input_json="1", rollout_id="mine")], request_id="r")
    first, again = await twice(calls, "Start", request, pb.Rollouts)
    assert first == again
    assert isinstance(again, pb.Rollouts)
    assert other.token
    assert [r.HasField("token") for r in again.rollouts] == [True, False]


async def test_a_repeated_start_attempt_begins_one_attempt(queue: LocalQueue, calls: Calls) -> None:
    [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    first, again = await twice(calls, "StartAttempt", pb.StartAttemptRequest(rollout_ids=[rollout.rollout_id], request_id="r"), pb.Rollouts)
    assert first == again
    assert len(await queue.client.query_attempts([rollout.rollout_id])) == 1


async def test_a_repeated_update_takes_effect_once(queue: LocalQueue, calls: Calls) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    [claim] = await queue.client.claim()
    update = pb.AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", status="failed")
    request = pb.UpdateAttemptsRequest(updates=[update], request_id="r")
    first = await calls.call("UpdateAttempts", request, pb.Attempts)
    queue.clock.advance(5)
    assert await calls.call("UpdateAttempts", request, pb.Attempts) == first
    requeue = pb.UpdateRolloutsRequest(updates=[pb.RolloutUpdate(rollout_id=claim.rollout_id, status="requeuing")], request_id="q")
    await calls.call("UpdateRollouts", requeue, pb.Rollouts)
    [again] = await queue.client.claim()
    repeated = await calls.call("UpdateRollouts", requeue, pb.Rollouts)
    assert [r.attempt.attempt_id for r in repeated.rollouts] == [again.attempt.attempt_id]
    assert await queue.client.claim() == []


async def test_repeated_numbers_resources_and_deletions_return_the_same(queue: LocalQueue, calls: Calls) -> None:
    numbers = pb.TakeSequenceRequest(requests=[pb.SequenceRequest(rollout_id="ro-1", count=5)], request_id="a")
    first, again = await twice(calls, "TakeSequence", numbers, pb.TakeSequenceResponse)
    assert first == again
    assert await queue.client.take_sequence([("ro-1", 1, 0)]) == [6]

    first, again = await twice(calls, "PutResources", pb.PutResourcesRequest(resources_json="{}", request_id="b"), pb.ResourcesList)
    assert first == again
    assert len(await queue.client.query_resources(all_versions=True)) == 1

    [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    first, again = await twice(calls, "Delete", pb.DeleteRequest(rollout_ids=[rollout.rollout_id], request_id="c"), pb.DeleteResponse)
    assert first == again == pb.DeleteResponse(deleted=1)


async def test_a_release_that_is_repeated_leaves_a_later_claim_alone(queue: LocalQueue, calls: Calls) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    [claim] = await queue.client.claim()
    request = pb.ReleaseRequest(attempt_ids=[claim.attempt.attempt_id], request_id="r")
    assert await calls.call("Release", request, pb.ReleaseResponse) == pb.ReleaseResponse(released=1)
    [later] = await queue.client.claim()
    assert await calls.call("Release", request, pb.ReleaseResponse) == pb.ReleaseResponse(released=1)
    assert (await queue.client.query_attempts([claim.rollout_id])).items[0].attempt_id == later.attempt.attempt_id


async def test_answers_are_kept_for_ten_minutes_and_over_a_restart(queue: LocalQueue) -> None:
    request = pb.EnqueueRequest(rollouts=[TASK], request_id="r")
    for age, rollouts in ((0, 1), (599, 1), (2, 2)):
        await queue.sweep(after=age)
        await queue.restart()
        calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=60)
        await calls.call("Enqueue", request, pb.Rollouts)
        await calls.close()
        assert len(await queue.client.query_rollouts()) == rollouts


async def test_a_request_id_of_another_call_is_refused(calls: Calls) -> None:
    await calls.call("Enqueue", pb.EnqueueRequest(rollouts=[TASK], request_id="r"), pb.Rollouts)
    with pytest.raises(UsageError, match="request id 'r' was used for Enqueue before"):
        await calls.call("Claim", pb.ClaimRequest(limit=1, request_id="r"), pb.Rollouts)


async def test_a_call_waits_for_a_queue_that_comes_back(queue_url: str) -> None:
    async with LocalQueue(queue_url) as queue:
        client = QueueClient(queue.client.address)
        port = queue.server.port
        await queue.stop()
        call = asyncio.create_task(client.statistics())
        await asyncio.sleep(0.05)
        assert not call.done()
        await queue.start(port)
        assert (await call)["total_rollouts"] == 0
        await client.close()


async def test_a_wait_goes_on_after_a_restart_of_the_queue(queue_url: str) -> None:
    async with LocalQueue(queue_url) as queue:
        [started] = await queue.client.start([EnqueueRolloutRequest(input=1)])
        client = QueueClient(queue.client.address)
        port = queue.server.port
        waiting = asyncio.ensure_future(anext(client.wait([started.rollout_id])))
        await queue.until_awaited(1)
        await queue.stop()
        await queue.start(port)
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=started.rollout_id, status="succeeded")])
        async with asyncio.timeout(300):
            assert [r.rollout_id for r in await waiting] == [started.rollout_id]
        await client.close()


async def test_a_queue_that_stays_away_is_reported_with_its_address() -> None:
    async with QueueClient("127.0.0.1:9", retry_seconds=0.1) as client:
        with pytest.raises(UnavailableError, match=r"queue at 127.0.0.1:9 does not answer"):
            await client.describe()


@contextlib.asynccontextmanager
async def answering(method: str, handler: Any) -> AsyncGenerator[str]:
    """Run a queue that has this method alone, and yield its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("agl.queue.v1.Queue", {method: handler})])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_a_queue_that_breaks_calls_off_as_it_ends_is_away() -> None:
    calls = 0

    async def ended(request: bytes, context: Any) -> None:
        nonlocal calls
        calls += 1
        await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")  # as a client sees a service that is killed before it answers

    handler = grpc.unary_unary_rpc_method_handler(ended)
    async with answering("Describe", handler) as address, QueueClient(address, retry_seconds=0.5) as client:
        with pytest.raises(UnavailableError, match=rf"queue at {address} does not answer \(CANCELLED\)"):
            await client.describe()
    assert calls > 1, "a call that was broken off is made again"


async def test_the_first_answer_of_a_wait_comes_at_once(queue: LocalQueue, calls: Calls) -> None:
    [started] = await queue.client.start([EnqueueRolloutRequest(input=1)])
    answers = calls.stream("Wait", lambda: pb.WaitRequest(rollout_ids=[started.rollout_id]), pb.Rollouts)
    async with asyncio.timeout(60):
        assert not (await anext(answers)).rollouts


async def test_a_wait_outlives_queues_that_end_long_after_it_began() -> None:
    ended = 0

    async def wait(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal ended
        yield b""  # as the queue does where no rollout has finished
        if ended < 3:
            ended += 1
            await asyncio.sleep(0.2)  # longer than the client tries again
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        yield pb.Rollouts(rollouts=[pb.Rollout(rollout_id="mine", input_json="1", status="succeeded")]).SerializeToString()

    handler = grpc.unary_stream_rpc_method_handler(wait)
    async with answering("Wait", handler) as address, QueueClient(address, retry_seconds=0.1) as client:
        found = [[rollout.rollout_id for rollout in finished] async for finished in client.wait(["mine"])]
    assert (found, ended) == ([["mine"]], 3)


async def test_a_queue_with_a_token_answers_only_callers_with_it(queue_url: str) -> None:
    async with LocalQueue(queue_url, token="s3cret") as queue:
        assert await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
        for token in ("", "guess"):
            async with QueueClient(queue.client.address, token=token) as unauthorized:
                with pytest.raises(SettingsError, match="AGL_TOKEN"):
                    await unauthorized.describe()
                with pytest.raises(SettingsError, match="AGL_TOKEN"):
                    await anext(unauthorized.wait(["ro-1"]))
