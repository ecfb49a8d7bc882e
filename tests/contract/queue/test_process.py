"""The real service process: start, clear startup errors, graceful stop, and no loss after kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from agl_otel.errors import UnavailableError
from agl_otel.queue.calls import Calls
from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.settings import free_port
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue

Start = Callable[..., Coroutine[None, None, asyncio.subprocess.Process]]
pytestmark = pytest.mark.full


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `python -m agl_otel.queue` on a port and data directory; what still runs at the end is killed."""
    processes: list[asyncio.subprocess.Process] = []

    async def start_one(port: int, data_dir: Path, **environment: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agl_otel.queue",
            cwd=tmp_path,
            env={**os.environ, "AGL_QUEUE_PORT": str(port), "AGL_DATA_DIR": str(data_dir), **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def refused(process: asyncio.subprocess.Process) -> str:
    """What a service that cannot start says; it must end with code 1 and without a traceback."""
    _, error = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 1
    assert b"Traceback" not in error
    return error.decode()


async def test_what_was_acknowledged_survives_kill_9(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = await start(port, tmp_path / "data")
    acknowledged: dict[str, str] = {}
    enough = asyncio.Event()
    async with QueueClient(f"127.0.0.1:{port}", retry_seconds=300) as client:
        await client.describe()
        client_in_a_hurry = QueueClient(f"127.0.0.1:{port}", retry_seconds=0)

        async def work(name: str) -> None:
            try:
                while True:
                    for rollout in await client_in_a_hurry.enqueue([EnqueueRolloutRequest(input=name)]):
                        acknowledged[rollout.rollout_id] = "queuing"
                    if len(acknowledged) >= 200:
                        enough.set()
                    for claim in await client_in_a_hurry.claim():
                        acknowledged[claim.rollout_id] = "preparing"
                        update = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", status="succeeded", token=claim.token)
                        await client_in_a_hurry.update_attempts([update])
                        acknowledged[claim.rollout_id] = "succeeded"
            except UnavailableError:
                return

        workers = [asyncio.create_task(work(str(i))) for i in range(8)]
        await enough.wait()
        process.send_signal(signal.SIGKILL)
        await asyncio.gather(*workers)
        await client_in_a_hurry.close()
        await process.wait()

        await start(port, tmp_path / "data")
        stored = {rollout.rollout_id: rollout.status for rollout in await client.query_rollouts()}
    order = ["queuing", "preparing", "succeeded"]  # a call that was not answered may or may not have happened: never less than answered
    assert all(order.index(stored[rollout_id]) >= order.index(status) for rollout_id, status in acknowledged.items())
    assert len(stored) - len(acknowledged) <= 8


async def until_claims_wait(address: str, claims: int) -> None:
    """Wait until so many claims wait at a queue in another process, by its metrics."""
    calls = Calls(address, token="", timeout_seconds=300, retry_seconds=300)
    async with asyncio.timeout(300):
        while True:
            answer = await calls.call("Statistics", pb.StatisticsRequest(metrics=True), pb.StatisticsResponse)
            if f"agl_queue_claims_waiting {claims:.1f}\n" in answer.metrics:
                break
            await asyncio.sleep(0.02)
    await calls.close()


async def test_sigterm_ends_waiting_calls_and_the_process_gracefully(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = await start(port, tmp_path / "data")
    async with QueueClient(f"127.0.0.1:{port}", retry_seconds=300) as client:
        await client.describe()
        claim = asyncio.create_task(client.claim(wait_seconds=600))
        await until_claims_wait(client.address, 1)
        process.terminate()
        assert await asyncio.wait_for(claim, 300) == []
        assert await asyncio.wait_for(process.wait(), 300) == 0


async def test_a_port_in_use_is_named_with_its_setting(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = await refused(await start(port, tmp_path / "data"))
    assert f"127.0.0.1:{port}" in message
    assert "AGL_QUEUE_PORT or --queue-port" in message


async def test_two_services_do_not_share_a_port_or_a_database(start: Start, tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path / 'data' / 'queue.db'}") as running:
        assert f":{running.server.port}" in await refused(await start(running.server.port, tmp_path / "other"))
        message = await refused(await start(free_port(), tmp_path / "data"))
    assert "queue.db is locked by another queue service" in message
    assert str(os.getpid()) in message


async def test_a_newer_database_is_refused_and_left_alone(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "data" / "queue.db"
    async with LocalQueue(f"sqlite:///{path}"):
        pass
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO schema_migrations VALUES (999, '0999_future.sql', 0)")
    database.close()
    message = await refused(await start(free_port(), tmp_path / "data"))
    assert str(path) in message
    assert "schema version 999" in message


async def test_what_is_not_a_database_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "data" / "queue.db"
    path.parent.mkdir()
    path.write_bytes(b"this is no database at all, but a text that somebody put here" * 20)
    message = await refused(await start(free_port(), tmp_path / "data"))
    assert f"{path} is not a usable queue database" in message


async def test_a_folder_that_cannot_be_created_is_named_with_the_setting(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = await refused(await start(free_port(), tmp_path / "file" / "data"))
    assert str(tmp_path / "file" / "data") in message
    assert "AGL_DATA_DIR" in message


async def test_an_unknown_database_is_refused_with_the_supported_ones(start: Start, tmp_path: Path) -> None:
    message = await refused(await start(free_port(), tmp_path / "data", AGL_QUEUE_URL="mysql://localhost"))
    assert "AGL_QUEUE_URL" in message
    assert "sqlite:///PATH" in message


async def test_the_tables_are_made_once(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    for _ in range(2):
        async with LocalQueue(f"sqlite:///{path}"):
            pass
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT version, name FROM schema_migrations").fetchall() == [(1, "schema_sqlite.sql")]
    database.close()
