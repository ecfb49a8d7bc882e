"""The metrics of a queue service, on every engine."""

from __future__ import annotations

import aiohttp
import pytest

from agl_otel.errors import NotFoundError
from agl_otel.queue.client import AttemptUpdate, RolloutUpdate
from agl_otel.settings import Settings, free_port
from agl_otel.telemetry.http import metrics_port
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue


async def samples(queue: LocalQueue) -> dict[str, float]:
    text = await queue.client.metrics()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


async def test_calls_transactions_and_ended_rollouts_are_counted(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=i, mode="train") for i in range(2)])
    await queue.client.enqueue([EnqueueRolloutRequest(input=2)])
    claimed = await queue.client.claim(3)
    queue.clock.advance(7.0)
    done = [AttemptUpdate(rollout_id=c.rollout_id, attempt_id=c.attempt.attempt_id, status="succeeded") for c in claimed]
    await queue.client.update_attempts(done)
    await queue.client.update_attempts(done[:1])  # again: it has ended already
    with pytest.raises(NotFoundError):
        await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-none", status="cancelled")])
    found = await samples(queue)
    for method, status, count in (
        ("enqueue_many_rollouts", "OK", 2),
        ("dequeue_many_rollouts", "OK", 1),
        ("update_rollout", "NOT_FOUND", 1),
    ):
        assert found[f'agl_store_total{{method="{method}",status="{status}",store_pubmeth="{method}"}}'] == count
        assert found[f'agl_store_latency_count{{method="{method}",status="{status}",store_pubmeth="{method}"}}'] == count
    assert found['agl_rollouts_total{mode="train",status="succeeded"}'] == 2
    assert found['agl_rollouts_total{mode="unknown",status="succeeded"}'] == 1
    assert found['agl_rollouts_duration_sum{mode="train",status="succeeded"}'] == 14.0
    assert found['agl_collections_total{operation="write",status="OK"}'] >= 4
    assert found['agl_collections_total{operation="write",status="NotFoundError"}'] == 1
    assert found["agl_queue_claims_waiting"] == 0


async def test_the_metrics_port_requires_the_token(queue: LocalQueue) -> None:
    port = free_port()
    settings = Settings.load(token="s3cret")
    async with metrics_port(queue.server.meters, settings, port, "AGL_QUEUE_METRICS_PORT"), aiohttp.ClientSession() as session:
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer s3cret"}, 200)):
            async with session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as answer:
                assert answer.status == status
                assert ("# TYPE agl_store_total counter" in await answer.text()) == (status == 200)
        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
