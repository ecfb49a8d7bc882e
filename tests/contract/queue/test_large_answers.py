"""Answers larger than the 64 MiB of a message to the queue arrive complete and equal to what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from agl_otel.queue.client import AttemptUpdate, RolloutUpdate
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.queue.service import CHUNK_ITEMS
from agl_otel.types import EnqueueRolloutRequest, PromptTemplate
from tests.local_queue import LocalQueue, QueueClient

COUNT = 5
LARGE = 14 << 20  # so many of them are more than 64 MiB


def large(number: int) -> str:
    return str(number) * LARGE


@pytest.mark.full
async def test_rollouts_of_any_size_are_queried_and_changed_in_one_call(queue: LocalQueue) -> None:
    client = queue.client
    started = await client.start([EnqueueRolloutRequest(input=large(n)) for n in range(COUNT)])
    names = [rollout.rollout_id for rollout in started]
    found = await client.query_rollouts()
    assert found.items == [rollout.model_copy(update={"token": None}) for rollout in started]
    assert ([r.input for r in found], found.total, found.limit) == ([large(n) for n in range(COUNT)], COUNT, -1)
    page = await client.query_rollouts(rollout_id_in=names, sort_order="desc", limit=COUNT, offset=1)
    assert ([r.rollout_id for r in page], page.total) == (names[-2::-1], COUNT)
    changed = await client.update_rollouts([RolloutUpdate(rollout_id=name, status="cancelled") for name in names])
    assert [(r.status, len(r.input)) for r in changed] == [("cancelled", LARGE)] * COUNT
    begun = await client.start_attempt(names)
    assert [r.attempt.sequence_id for r in begun] == [2] * COUNT
    assert [r.input for r in found] == [r.input for r in begun]


@pytest.mark.full
async def test_attempts_resources_and_workers_of_any_size_are_queried(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}") as queue:
        await fill_and_query(queue.client)


async def fill_and_query(client: QueueClient) -> None:
    started = await client.start([EnqueueRolloutRequest(input=n) for n in range(COUNT)])
    for number, rollout in enumerate(started):
        update = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, metadata={"m": large(number)})
        await client.update_attempts([update])
        await client.put_resources({"p": PromptTemplate(template=large(number), engine="f-string")})
        await client.heartbeat(f"w-{number}", stats={"s": large(number)})
    all_of_them = [large(n) for n in range(COUNT)]
    names = [rollout.rollout_id for rollout in started]
    by_rollout = {attempt.rollout_id: attempt for attempt in await client.query_attempts(names)}
    assert [(by_rollout[name].metadata or {})["m"] for name in names] == all_of_them
    assert [getattr(update.resources["p"], "template", None) for update in await client.query_resources()] == all_of_them
    workers = await client.query_workers()
    assert ([(worker.heartbeat_stats or {})["s"] for worker in workers], workers.total) == (all_of_them, COUNT)


async def test_an_answer_in_parts_is_read_again_after_a_lost_connection(queue_url: str) -> None:
    server = QueueServer(open_engine(queue_url))
    service: Any = server.service
    whole, tries = service.StreamRollouts, 0

    async def cut(request: Any, context: Any) -> Any:
        nonlocal tries
        tries += 1
        async for part in whole(request, context):
            yield part
            if tries == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    service.StreamRollouts = cut
    async with QueueClient(await server.start("127.0.0.1", 0), retry_seconds=60) as client:
        inputs = [*range(CHUNK_ITEMS + 1)]
        await client.enqueue([EnqueueRolloutRequest(input=n) for n in inputs])
        assert [rollout.input for rollout in await client.query_rollouts()] == inputs
    await server.stop()
    assert tries == 2
