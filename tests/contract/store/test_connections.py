"""The ways to get a store, and to use one."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.errors import UnavailableError
from agl_otel.settings import free_port
from agl_otel.store import (
    UNSET,
    CollectionBasedLightningStore,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    MongoLightningStore,
)
from agl_otel.store.address import Address
from agl_otel.store.connections import CONNECTIONS, Connected
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.types import Rollout


def test_the_attributes_that_a_copy_of_a_store_leaves_out_are_those_of_its_connections() -> None:
    assert vars(Connected(Address("127.0.0.1:4747"))).keys() == CONNECTIONS


async def test_a_store_reports_its_capabilities_and_counts(store: LightningStore) -> None:
    before = await store.statistics()
    await store.start_rollout("task", worker_id="w-statistics")
    after = await store.statistics()
    assert after.get("total_rollouts", 0) == before.get("total_rollouts", 0) + 1
    assert {"name", "total_attempts", "total_spans", "total_resources", "total_workers", "uptime"} <= after.keys()
    assert store.capabilities == {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": True}


async def test_several_tasks_may_be_the_first_to_read(tmp_path: Path) -> None:
    store = LightningStore(source=EmbeddedStack(tmp_path))
    await store.enqueue(["task"])  # by the queue alone: the other services are not looked up yet
    assert await asyncio.gather(*(store.arms(0.0) for _ in range(8))) == [[]] * 8
    await store.close()


async def test_otlp_is_sent_to_the_stores_endpoint(store: LightningStore) -> None:
    endpoint = store.otlp_traces_endpoint()
    assert endpoint.endswith("/v1/traces")
    async with aiohttp.ClientSession() as session, session.post(endpoint, headers={"Content-Type": "application/x-protobuf"}) as answer:
        assert answer.status == 200


async def test_a_client_needs_one_address_and_connects_at_first_use(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("task")
    client = LightningStoreClient(f"http://{store.description.queue}", request_timeout=300.0)
    assert isinstance(client, LightningStore)
    assert await client.get_rollout_by_id(rollout.rollout_id) == rollout
    await client.close()
    with pytest.raises(ValueError, match="closed"):
        await client.statistics()
    assert (await store.get_rollout_by_id(rollout.rollout_id)) == rollout  # the stack goes on
    async with await LightningStore.connect(store.description.queue) as connected:
        assert await connected.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_a_copy_in_another_process_uses_the_same_stack(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("task")
    async with pickle.loads(pickle.dumps(store)) as copy:
        assert await copy.get_rollout_by_id(rollout.rollout_id) == rollout
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET


async def test_threads_may_use_one_store_at_once(store: LightningStore) -> None:
    found: list[str] = []

    def work(number: int) -> None:
        found.extend(asyncio.run(store.enqueue_rollout(number)).rollout_id for _ in range(2))  # an ended loop leaves nothing behind

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    assert len(set(found)) == 6
    assert len(await store.query_rollouts(found)) == 6
    assert LightningStoreThreaded(store) is store


async def test_embedded_stores_live_side_by_side_and_keep_what_they_hold(tmp_path: Path, store: LightningStore) -> None:
    folder = tmp_path / "data"
    async with LightningStore.embedded(folder) as first:
        rollout = await first.enqueue_rollout("task")
        assert await store.get_rollout_by_id(rollout.rollout_id) is None
        async with LightningStore.embedded(folder) as second:  # a stack that runs there is used
            assert await second.get_rollout_by_id(rollout.rollout_id) == rollout
        assert await first.get_rollout_by_id(rollout.rollout_id) == rollout
    async with LightningStore.embedded(folder) as again:
        assert await again.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_an_embedded_stack_ends_with_its_last_user(tmp_path: Path) -> None:
    first, second = LightningStore.embedded(tmp_path), LightningStore.embedded(tmp_path)
    rollout = await first.enqueue_rollout("task")
    assert await second.get_rollout_by_id(rollout.rollout_id) == rollout
    await first.close()
    assert await second.get_rollout_by_id(rollout.rollout_id) == rollout
    async with LightningStore.embedded(tmp_path) as third:
        assert await third.get_rollout_by_id(rollout.rollout_id) == rollout
        address = second.description.queue
        assert third.description.queue == address
    await second.close()
    async with LightningStore.embedded(tmp_path) as again:  # waits for the end of the stack
        assert await again.get_rollout_by_id(rollout.rollout_id) == rollout and again.description.queue != address


def test_a_store_in_memory_is_made_at_once_and_may_never_be_used() -> None:
    store = InMemoryLightningStore(thread_safe=True, scan_debounce_seconds=0)
    asyncio.run(store.close())


async def test_a_store_whose_stack_is_killed_says_so() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout("task")
    source = store._source  # pyright: ignore[reportPrivateUsage]
    assert isinstance(source, EmbeddedStack) and source._process is not None  # pyright: ignore[reportPrivateUsage]
    source._process.kill()  # pyright: ignore[reportPrivateUsage]
    source._process.wait()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UnavailableError, match=r"private stack of this store was killed by SIGKILL .*make a new store"):
        await store.enqueue_rollout("task")
    await store.close()


@pytest.mark.parametrize("entered", [False, True])
async def test_a_store_in_memory_opens_clickhouse_when_a_span_or_a_read_needs_it(entered: bool) -> None:
    store = InMemoryLightningStore()
    if entered:
        await store.__aenter__()
    rollout = await store.enqueue_rollout("task")
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout and store.description.clickhouse is None
    source = store._source  # pyright: ignore[reportPrivateUsage]
    assert isinstance(source, EmbeddedStack)
    folder = source.directory
    assert folder is not None and not (folder / "traces").exists()
    assert not await store.query_spans(rollout.rollout_id) and store.description.clickhouse is not None
    assert (folder / "traces").exists()
    await store.close()
    assert not folder.exists()


async def test_the_queue_of_an_embedded_store_works_where_its_clickhouse_does_not(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("no folder")
    store = LightningStore.embedded(tmp_path)
    rollout = await store.enqueue_rollout("task")
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"collector ended with exit code 1: .*traces"):
            await store.query_spans(rollout.rollout_id)
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
    await store.close()


@pytest.mark.long  # two minutes
def test_a_hundred_embedded_stores_leave_nothing_behind() -> None:
    program = """
import asyncio, os, threading
from agl_otel.store import InMemoryLightningStore

def left():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

async def use(number):
    store = InMemoryLightningStore()
    await store.enqueue_rollout("task")
    if number % 10 == 0:
        await store.statistics()
    await store.close()
    assert not store._source.directory.exists()

for number in range(100):
    asyncio.run(use(number))
    if number == 10:
        before = left()
print(*before, *left(), len(open(f"/proc/self/task/{os.getpid()}/children").read().split()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    threads, files, threads_left, files_left, children = map(int, done.stdout.split())
    assert (threads_left, files_left) <= (threads, files) and children == 0


async def test_an_embedded_stack_ends_with_its_process_even_if_that_is_killed() -> None:
    program = """
import asyncio, os, signal
from agl_otel.store import InMemoryLightningStore
store = InMemoryLightningStore()
asyncio.run(store.statistics())
if os.fork() == 0:
    raise SystemExit  # a child that ends takes nothing along
os.wait()
asyncio.run(store.statistics())
print(store._source.address(), store._source.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    address, directory = done.stdout.split()
    async with asyncio.timeout(300):
        while await asyncio.to_thread(Path(directory).exists):  # noqa: ASYNC110 - the condition lies in another process
            await asyncio.sleep(0.05)
    host, port = address.split(":")
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection(host, int(port))


async def test_a_missing_stack_is_reported_on_first_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        await LightningStore.connect("nonsense")
    with pytest.raises(UnavailableError, match="agl-otel up"):
        await LightningStoreClient(f"http://127.0.0.1:{free_port()}").statistics()
    (tmp_path / "VERSION").write_text("99")
    with pytest.raises(UnavailableError, match="layout version 99"):
        await LightningStore.embedded(tmp_path).statistics()


async def test_a_server_serves_its_store_where_it_is_told_to() -> None:
    port = free_port()
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", port)
    with pytest.raises(ValueError, match="start"):
        _ = server.endpoint
    await server.start()
    assert server.endpoint == f"http://127.0.0.1:{port}"
    rollout = await server.enqueue_rollout("task")
    async with LightningStoreClient(f"http://127.0.0.1:{port}") as client:
        assert await client.get_rollout_by_id(rollout.rollout_id) == await server.get_rollout_by_id(rollout.rollout_id) == rollout
    await server.stop()
    await server.store.close()


class Noting(LightningStore):
    """As users of 0.3 wrote them: without a call of our `__init__`."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    async def enqueue_rollout(self, *arguments: Any, **named: Any) -> Rollout:
        rollout = await super().enqueue_rollout(*arguments, **named)
        self.noted.append(rollout.rollout_id)
        return rollout


async def test_a_users_own_store_has_a_stack_and_its_copies_are_of_its_class() -> None:
    store = Noting()
    first = await store.enqueue_rollout("task")
    for copy in (store.at(store.description.queue), pickle.loads(pickle.dumps(store))):
        assert type(copy) is Noting and copy.noted == [first.rollout_id]
        assert await copy.get_rollout_by_id(first.rollout_id) == first
        await copy.close()
    await store.close()


@pytest.mark.parametrize("name", [CollectionBasedLightningStore, MongoLightningStore])
def test_an_unsupported_name_of_03_names_its_replacement(name: type) -> None:
    with pytest.raises(ValueError, match=rf"{name.__name__} does not exist here: .*(AGL_STORE|AGL_QUEUE_URL)"):
        name(object())
