"""Several queue services on one PostgreSQL database act as one, and survive the end of others and a restart of the database."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agl_otel.errors import ConflictError, UnavailableError
from agl_otel.queue.calls import Calls
from agl_otel.queue.client import AttemptUpdate, QueueClient, RolloutUpdate
from agl_otel.queue.postgres import signals
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.settings import free_port
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from tests.local_queue import LocalQueue, ManualClock
from tests.postgres_server import Postgres, running

ORDER = ["queuing", "preparing", "succeeded"]


def tasks(*inputs: object) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(input=value) for value in inputs]


@pytest.fixture
async def pair(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LocalQueue, LocalQueue]]:
    """Two services on one database, begun at once (so that both migrate), with one clock."""
    monkeypatch.setattr(signals, "LOOK_SECONDS", 3600.0)  # by itself nobody looks: what one is told of the other comes by notification
    url, clock = postgres.new_schema(), ManualClock()
    a, b = LocalQueue(url, clock=clock), LocalQueue(url, clock=clock)
    await asyncio.gather(a.start(), b.start())
    yield a, b
    await asyncio.gather(a.stop(), b.stop())


async def until_waiting(queue: LocalQueue, claims: int) -> None:
    async with asyncio.timeout(300):
        while queue.server.service.claims_waiting != claims:  # noqa: ASYNC110 - in one loop with the service: a turn each
            await asyncio.sleep(0)


async def test_claimers_at_both_never_get_the_same_rollout(pair: tuple[LocalQueue, LocalQueue]) -> None:
    taken: list[AttemptedRollout] = []

    async def claimer(client: QueueClient, name: str) -> None:
        while len(taken) < 160:  # and not until one of them finds nothing: the next enqueue may take its time
            taken.extend(await client.claim(3, worker_id=name, wait_seconds=0.5))

    claimers = [asyncio.create_task(claimer(pair[i % 2].client, f"w{i}")) for i in range(8)]
    for start in range(0, 160, 20):
        await pair[start // 20 % 2].client.enqueue(tasks(*range(start, start + 20)))
    await asyncio.gather(*claimers)
    assert sorted(c.input for c in taken) == [*range(160)]
    assert len({c.attempt.attempt_id for c in taken}) == 160


async def test_a_claim_that_waits_at_one_gets_what_is_enqueued_at_the_other(pair: tuple[LocalQueue, LocalQueue]) -> None:
    claim = asyncio.create_task(pair[1].client.claim(wait_seconds=300))
    await until_waiting(pair[1], 1)
    await pair[0].client.enqueue(tasks("x"))
    assert [c.input for c in await claim] == ["x"]


@pytest.fixture
def crowded() -> Iterator[None]:
    """More open files than select() takes, as a service with a thousand clients has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for each in held:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_services_with_a_thousand_open_files_hear_of_each_other(crowded: None, pair: tuple[LocalQueue, LocalQueue]) -> None:
    waiting = asyncio.create_task(pair[0].client.claim(worker_id="w", wait_seconds=300))
    await until_waiting(pair[0], 1)
    await pair[1].client.enqueue(tasks("x"))
    assert [each.input for each in await waiting] == ["x"]


async def test_a_wait_at_one_ends_when_the_rollout_ends_at_the_other(pair: tuple[LocalQueue, LocalQueue]) -> None:
    started = await pair[0].client.start(tasks(*range(120)))  # more than one notification holds
    waiting = pair[1].client.wait([c.rollout_id for c in started])
    first = asyncio.ensure_future(anext(waiting))
    await pair[1].until_awaited(len(started))
    await pair[0].client.update_rollouts([RolloutUpdate(rollout_id=c.rollout_id, status="succeeded") for c in started])
    async with asyncio.timeout(300):
        ended = [*await first]
        async for more in waiting:
            ended += more
    assert {r.rollout_id for r in ended} == {c.rollout_id for c in started}


async def test_a_request_that_is_repeated_at_the_other_happens_once(pair: tuple[LocalQueue, LocalQueue]) -> None:
    request = pb.EnqueueRequest(rollouts=[pb.NewRollout(input_json="1")], request_id="r", idempotency_key="k")
    calls = [Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=30) for queue in pair]
    answers = await asyncio.gather(*(calls[i % 2].call("Enqueue", request, pb.Rollouts) for i in range(8)))
    assert len({answer.rollouts[0].rollout_id for answer in answers}) == 1
    claim = pb.ClaimRequest(limit=1, request_id="c")
    claims = await asyncio.gather(*(calls[i % 2].call("Claim", claim, pb.Rollouts) for i in range(8)))
    assert len({answer.rollouts[0].token for answer in claims}) == 1
    await asyncio.gather(*(c.close() for c in calls))
    assert len(await pair[0].client.query_attempts([claims[0].rollouts[0].rollout_id])) == 1


async def test_concurrent_changes_at_both_services_are_serialised(pair: tuple[LocalQueue, LocalQueue]) -> None:
    a, b = pair[0].client, pair[1].client
    assert sorted(await asyncio.gather(*((a, b)[i % 2].lease("maintain", str(i), 10) for i in range(8)))) == [False] * 7 + [True]
    numbers = await asyncio.gather(*((a, b)[i % 2].take_sequence([("x", 2, 0), ("y", 1, 0)][:: 1 if i % 3 else -1]) for i in range(12)))
    assert {n for pair_ in numbers for n in pair_} >= {1}
    assert await a.take_sequence([("x", 1, 0), ("y", 1, 0)]) == [25, 13]
    own = [EnqueueRolloutRequest(input=1, rollout_id=f"own-{i}") for i in range(5)]
    made = await asyncio.gather(*((a, b)[i % 2].enqueue(own[:: 1 if i % 3 else -1]) for i in range(6)))
    assert all({r.rollout_id for r in rollouts} == {r.rollout_id for r in own} for rollouts in made)
    assert len(await a.query_rollouts()) == 5
    versions = await asyncio.gather(
        *((a, b)[i % 2].put_resources({"m": LLM(endpoint=f"http://{i}", model="m")}, resources_id="r") for i in range(6))
    )
    assert sorted(v.version for v in versions) == [1, 2, 3, 4, 5, 6]
    ids = [f"own-{i}" for i in range(5)]
    claims = await a.claim(5)
    updates = [AttemptUpdate(rollout_id=c.rollout_id, attempt_id="latest", status="failed") for c in claims]
    requeue = [RolloutUpdate(rollout_id=rollout_id, status="requeuing") for rollout_id in reversed(ids)]
    await asyncio.gather(
        *(a.update_attempts(updates) for _ in range(3)), *(b.update_rollouts(requeue) for _ in range(3)), b.start_attempt(ids)
    )
    await asyncio.gather(a.delete(ids), *(b.claim(1) for _ in range(4)), b.start_attempt(ids), return_exceptions=True)
    await a.delete(ids)
    assert (await a.statistics())["total_attempts"] == 0


async def test_two_watchdogs_time_an_attempt_out_once(pair: tuple[LocalQueue, LocalQueue]) -> None:
    config = RolloutConfig(timeout_seconds=5, max_attempts=2, retry_condition=["timeout"])
    await pair[0].client.start([EnqueueRolloutRequest(input=i, config=config) for i in range(10)])
    pair[0].clock.advance(6)
    assert sum(await asyncio.gather(*(queue.sweep() for queue in pair * 2))) == 10
    assert [c.attempt.sequence_id for c in await pair[1].client.claim(20)] == [2] * 10


async def test_a_newer_database_is_refused(postgres: Postgres) -> None:
    url = postgres.new_schema()
    schema = url.rpartition("%3D")[2]
    async with LocalQueue(url):
        pass
    postgres.sql(f"INSERT INTO {schema}.schema_migrations VALUES (999, '0999_future.sql', 0)")
    with pytest.raises(ConflictError, match="schema version 999"):
        await LocalQueue(url).start()


# --- processes


class Workers:
    """Clients that enqueue, claim and finish rollouts, and record what was acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, str] = {}
        self.enough = asyncio.Event()

    async def work(self, client: QueueClient, rollouts: int) -> None:
        try:
            while True:
                for rollout in await client.enqueue(tasks(1)):
                    self.acknowledged[rollout.rollout_id] = "queuing"
                if len(self.acknowledged) >= rollouts:
                    self.enough.set()
                for claim in await client.claim():
                    assert self.acknowledged.get(claim.rollout_id) in (None, "queuing")
                    self.acknowledged[claim.rollout_id] = "preparing"
                    update = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", status="succeeded", token=claim.token)
                    await client.update_attempts([update])
                    self.acknowledged[claim.rollout_id] = "succeeded"
        except UnavailableError:
            return

    async def check(self, client: QueueClient) -> None:
        stored = {rollout.rollout_id: rollout.status for rollout in await client.query_rollouts()}
        assert all(ORDER.index(stored[rollout_id]) >= ORDER.index(status) for rollout_id, status in self.acknowledged.items())


@pytest.mark.full
async def test_a_killed_service_loses_nothing(postgres: Postgres, tmp_path: Path) -> None:
    url, port = postgres.new_schema(), free_port()
    environment = {**os.environ, "AGL_QUEUE_URL": url, "AGL_QUEUE_PORT": str(port), "AGL_DATA_DIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "agl_otel.queue", cwd=tmp_path, env=environment)
    async with LocalQueue(url) as other, QueueClient(f"127.0.0.1:{port}", retry_seconds=300) as client:
        await client.describe()
        workers = Workers()
        async with QueueClient(f"127.0.0.1:{port}", retry_seconds=0) as hasty:
            killed = [asyncio.create_task(workers.work(hasty, 80)) for _ in range(4)]
            others = [asyncio.create_task(workers.work(other.client, 80)) for _ in range(2)]
            await workers.enough.wait()
            process.send_signal(signal.SIGKILL)
            await asyncio.gather(*killed)
        await process.wait()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await workers.check(other.client)
        assert await other.client.enqueue(tasks(2))


@pytest.fixture
def own_postgres(postgres: Postgres) -> object:
    """A server that a test may stop (the shared one says whether there can be one)."""
    yield from running()


@pytest.mark.full
@pytest.mark.parametrize("kill", [False, True])
async def test_a_service_outlives_a_restart_of_the_database_and_nothing_is_lost(own_postgres: Postgres, kill: bool) -> None:
    async with LocalQueue(own_postgres.url()) as queue:
        workers = Workers()
        async with QueueClient(queue.client.address, retry_seconds=0) as hasty:
            busy = [asyncio.create_task(workers.work(hasty, 60)) for _ in range(4)]
            await workers.enough.wait()
            await asyncio.to_thread(own_postgres.stop, kill=kill)
            await asyncio.gather(*busy)
            with pytest.raises(UnavailableError, match=r"cannot be used now|does not answer"):
                await hasty.statistics()
        late = asyncio.create_task(queue.client.enqueue(tasks("late")))
        await asyncio.to_thread(own_postgres.start)
        [rollout] = await late
        await workers.check(queue.client)
        waiting = queue.client.wait([rollout.rollout_id], timeout_seconds=300)
        first = asyncio.ensure_future(anext(waiting))
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        assert [r.status for r in await first] == ["cancelled"]
