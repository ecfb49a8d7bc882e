"""Faults that the queue must survive: kill -9 of it and of PostgreSQL under load, frozen workers, wrong clocks, full disks.

With real processes. CHAOS_ROLLOUTS=100000 runs the load at full size: 64 workers, a fault every few seconds, a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agl_otel.errors import DiskFullError
from agl_otel.queue.client import Observation, QueueClient
from agl_otel.types import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig
from tests.postgres_server import NoPostgresError, Postgres
from tests.small_disk import fill, on_small_disk, with_quota
from tests.system.queue_history import complaints
from tests.system.queue_process import Child, QueueProcess, wrong_clock

pytestmark = [pytest.mark.full]
ROLLOUTS = int(os.environ.get("CHAOS_ROLLOUTS", "2500"))
WORKER_PROCESSES = 4
WORKERS = 16  # per process
PAGE = 1000
FROZEN_SECONDS = 4.0
CONFIG = RolloutConfig(
    max_attempts=3, retry_condition=["failed", "unresponsive", "timeout"], unresponsive_seconds=2.0, timeout_seconds=30.0
)
Fault = Callable[[], Awaitable[None]]


@asynccontextmanager
async def ended(*children: Child) -> AsyncGenerator[None]:
    """Start these processes for the block; none is left after it."""
    try:
        for child in children:
            await child.start()
        yield
    finally:
        for child in children:
            await child.end()


async def enqueue_all(client: QueueClient, count: int, config: RolloutConfig = CONFIG, *, until: asyncio.Event | None = None) -> list[str]:
    """Enqueue while others claim, and more than `count` where `until` is not set by then.

    A batch without a response is sent again with its key.
    """
    ids: list[str] = []
    while len(ids) < count or (until and not until.is_set()):
        if (start := len(ids)) >= count:
            await asyncio.sleep(0.2)
        requests = [EnqueueRolloutRequest(input=start + i, config=config) for i in range(min(250, count - start) if start < count else 250)]
        ids += [rollout.rollout_id for rollout in await client.enqueue(requests, idempotency_key=f"batch-{start}")]
    return ids


async def all_of(client: QueueClient, ids: list[str]) -> tuple[list[Rollout], list[Attempt]]:
    rollouts: list[Rollout] = []
    attempts: list[Attempt] = []
    for start in range(0, len(ids), PAGE):
        part = ids[start : start + PAGE]
        rollouts += await client.query_rollouts(rollout_id_in=part)
        attempts += await client.query_attempts(part)
    return rollouts, attempts


async def load(queues: list[QueueProcess], folder: Path, faults: list[Fault], *, seed: int) -> None:
    """Run rollouts through the queues with 64 workers during faults, then check the history."""
    chance = random.Random(seed)
    journals = [folder / f"worker-{number}.jsonl" for number in range(WORKER_PROCESSES)]
    workers = [
        Child(
            [
                sys.executable,
                "-m",
                "tests.system.queue_load",
                queues[number % len(queues)].address,
                str(journal),
                str(WORKERS),
                str(number),
            ],
            folder / f"worker-{number}.log",
        )
        for number, journal in enumerate(journals)
    ]

    async def freeze() -> None:  # longer than its attempts may be silent
        workers[0].process.send_signal(signal.SIGSTOP)  # pyright: ignore[reportOptionalMemberAccess] - it runs
        await asyncio.sleep(FROZEN_SECONDS)
        workers[0].process.send_signal(signal.SIGCONT)  # pyright: ignore[reportOptionalMemberAccess] - it runs

    reported: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ended(*queues, *workers))
        client = await stack.enter_async_context(QueueClient(queues[0].address, timeout_seconds=20, retry_seconds=300))
        await client.describe()
        struck, finished = asyncio.Event(), asyncio.Event()
        enqueuing = asyncio.create_task(enqueue_all(client, ROLLOUTS, until=struck))

        async def disturb() -> None:
            while not finished.is_set():  # at least one round of all faults: the load lasts until `struck`
                for fault in chance.sample([*faults, freeze], len(faults) + 1):
                    if not finished.is_set():
                        await fault()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(finished.wait(), chance.uniform(0.3, 1.5))
                struck.set()

        disturbing = asyncio.create_task(disturb())
        disturbing.add_done_callback(lambda _: struck.set())  # a fault that fails is to fail the test, not to enqueue for ever
        ids = await enqueuing
        for start in range(0, len(ids), 10 * PAGE):
            async for some in client.wait(ids[start : start + 10 * PAGE]):
                reported |= {rollout.rollout_id: rollout.status for rollout in some}
        finished.set()
        await disturbing
        for worker in workers:
            assert await worker.end(signal.SIGTERM) == 0, worker.log.read_text()[-2000:]
        rollouts, attempts = await all_of(client, ids)
        statistics = await client.statistics()
    events: list[dict[str, Any]] = [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]
    assert complaints(ids, events, rollouts, attempts, reported) == []
    assert len(ids) == len(set(ids)) == len(reported) >= ROLLOUTS
    by_status = {status: sum(r.status == status for r in rollouts) for status in {r.status for r in rollouts}}
    assert (statistics["rollouts_by_status"], statistics["total_attempts"], statistics["claimable"]) == (by_status, len(attempts), 0)
    assert sum(event["event"] == "report" for event in events) > len(ids) / 2, "the workers did little: the history proves nothing"


@pytest.mark.timeout(3600 if ROLLOUTS > 10_000 else 600)
async def test_kill_9_of_the_queue_under_load_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    queue = QueueProcess(f"sqlite:///{tmp_path / 'queue.db'}", tmp_path)
    kills = 0

    async def kill() -> None:
        nonlocal kills
        await queue.end(signal.SIGKILL)
        await queue.start()
        kills += 1

    await load([queue], tmp_path, [kill], seed=1)
    assert kills


@pytest.mark.timeout(3600 if ROLLOUTS > 10_000 else 600)
async def test_two_queues_and_their_postgres_are_killed_under_load(tmp_path: Path, server: Postgres) -> None:
    queues = [QueueProcess(server.new_schema(), tmp_path)]
    queues.append(QueueProcess(queues[0].environment["AGL_QUEUE_URL"], tmp_path))  # two services, two watchdogs, one database
    kills = {"queue": 0, "postgres": 0}

    async def kill_queue() -> None:
        await queues[1].end(signal.SIGKILL)
        await queues[1].start()
        kills["queue"] += 1

    async def kill_postgres() -> None:
        await asyncio.to_thread(server.stop, kill=True)
        await asyncio.to_thread(server.start)
        kills["postgres"] += 1

    await load(queues, tmp_path, [kill_queue, kill_postgres], seed=2)
    assert all(kills.values())


@pytest.fixture
def unstarted() -> Any:
    """A PostgreSQL of the test's own, because the test kills or starves it."""
    try:
        server = Postgres()
    except NoPostgresError as error:
        pytest.skip(str(error))
    yield server
    server.close()


@pytest.fixture
def server(unstarted: Postgres) -> Postgres:
    """The same, running."""
    unstarted.start()
    return unstarted


async def test_services_with_clocks_two_minutes_apart_agree_on_overdue_attempts(tmp_path: Path, server: Postgres) -> None:
    url = server.new_schema()
    right = QueueProcess(url, tmp_path)
    ahead = QueueProcess(url, tmp_path, environment=wrong_clock(tmp_path / "ahead", 120.0))
    patient = RolloutConfig(unresponsive_seconds=60.0)
    async with ended(right), QueueClient(right.address, retry_seconds=300) as client:
        await client.enqueue([EnqueueRolloutRequest(input=1, config=patient), EnqueueRolloutRequest(input=2, config=patient)])
        claims = await client.claim(2)
        await client.observe([Observation(claims[0].rollout_id, claims[0].attempt.attempt_id, 1, 1.0)], sent_at=1.0)  # a clock of 1970
        await client.enqueue([EnqueueRolloutRequest(input="short", config=RolloutConfig(unresponsive_seconds=0.5))])
        [short] = await client.claim(1)
    async with ended(ahead), QueueClient(ahead.address, retry_seconds=300) as client:  # only its watchdog is left
        async for [finished] in client.wait([short.rollout_id], timeout_seconds=60):
            assert finished.status == "failed"
        statuses = {r.rollout_id: r.status for r in await client.query_rollouts()}
    assert statuses == {claims[0].rollout_id: "running", claims[1].rollout_id: "preparing", short.rollout_id: "failed"}


async def test_a_full_disk_refuses_writes_until_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    queue = QueueProcess(f"sqlite:///{disk / 'queue.db'}", tmp_path, before=on_small_disk(disk, "8m"))
    async with ended(queue), QueueClient(queue.address, retry_seconds=300) as client:
        await client.describe()
        kept: list[str] = []
        ballast = await asyncio.to_thread(fill, queue.pid, disk, leave=2 << 20)
        with pytest.raises(DiskFullError, match=rf"^the queue's database {disk}/queue.db cannot be written, its disk is full .*make room"):
            async with asyncio.timeout(60):  # fails at once; a retryable error would take this client five minutes
                while True:
                    kept += [r.rollout_id for r in await client.enqueue([EnqueueRolloutRequest(input="x" * 100_000)])]
        assert kept
        assert {r.rollout_id for r in await client.query_rollouts()} == {*kept}
        await asyncio.to_thread(ballast.unlink)
        kept += [r.rollout_id for r in await client.enqueue([EnqueueRolloutRequest(input="x" * 100_000)])]
        assert [claim.rollout_id for claim in await client.claim(1000)] == kept


async def test_an_exhausted_quota_is_reported_as_a_full_disk_at_once(tmp_path: Path) -> None:
    """SQLite reports it as an I/O error, which a client would retry for its full retry time: here five minutes, longer than the test."""
    data = tmp_path / "data"
    environment, switch = with_quota(data, tmp_path)
    queue = QueueProcess(f"sqlite:///{data / 'queue.db'}", tmp_path, environment=environment)
    async with ended(queue), QueueClient(queue.address, retry_seconds=300) as client, asyncio.timeout(60):
        (kept,) = await client.enqueue([EnqueueRolloutRequest(input="before")])
        switch.touch()
        with pytest.raises(
            DiskFullError, match=rf"^the queue's database {data}/queue.db cannot be written, its disk is full \(Disk quota exc"
        ):
            await client.enqueue([EnqueueRolloutRequest(input="x")])
        switch.unlink()
        (more,) = await client.enqueue([EnqueueRolloutRequest(input="after")])
        assert [claim.rollout_id for claim in await client.claim(9)] == [kept.rollout_id, more.rollout_id]


async def test_a_full_disk_of_postgres_refuses_writes_until_there_is_room(tmp_path: Path, unstarted: Postgres) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("this needs root, for a small disk of its own under PostgreSQL")
    data = unstarted.folder / "data"
    used = sum(file.stat().st_size for file in data.rglob("*"))
    disk = f"mount -t tmpfs -o size={used + (24 << 20)} tmpfs small && chown --reference=data small && chmod --reference=data small"
    await asyncio.to_thread(
        unstarted.start,
        ["unshare", "-m", "sh", "-c", f'mkdir small && {disk} && cp -a data/. small/ && mount --bind small data && exec "$0" "$@"'],
    )
    queue = QueueProcess(unstarted.new_schema(), tmp_path)
    ballast = Path(f"/proc/{unstarted.pids()[0]}/root{data}/ballast")
    chance = random.Random(1)
    async with ended(queue), QueueClient(queue.address, retry_seconds=300) as client:
        await client.describe()
        free = os.statvfs(ballast.parent).f_bavail * os.statvfs(ballast.parent).f_frsize
        await asyncio.to_thread(ballast.write_bytes, b"x" * (free - (4 << 20)))
        kept: list[str] = []
        with pytest.raises(DiskFullError, match=r"cannot be written, its disk is full .*make room"):
            async with asyncio.timeout(60):  # fails at once; a retryable error would take this client five minutes
                while len(kept) < 200:
                    task = EnqueueRolloutRequest(input=chance.randbytes(50_000).hex())  # PostgreSQL cannot compress it
                    kept += [r.rollout_id for r in await client.enqueue([task])]
        assert kept
        assert {r.rollout_id for r in await client.query_rollouts()} == {*kept}
        await asyncio.to_thread(ballast.unlink)
        kept += [r.rollout_id for r in await client.enqueue([EnqueueRolloutRequest(input="x" * 100_000)])]
        assert [claim.rollout_id for claim in await client.claim(1000)] == kept
