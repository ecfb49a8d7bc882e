"""The embedded engine: groups, failures of one and of all, signals, the end."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agl_otel.errors import ConflictError, DiskFullError, InUseError, UnavailableError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.engine import Signals, Transaction
from agl_otel.queue.operations import checks, enqueue
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.queue.sqlite import SqliteEngine
from agl_otel.types import EnqueueRolloutRequest, RolloutConfig


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SqliteEngine]:
    engine = SqliteEngine(tmp_path / "queue.db")
    yield engine
    await engine.close()


def add(tx: Transaction, name: str, text: str = "1") -> None:
    enqueue.enqueue(tx, pb.EnqueueRequest(rollouts=[pb.NewRollout(input_json=json.dumps(text), rollout_id=name)]), 1.0)


def stored(tx: Transaction) -> list[str]:
    return [row[0] for row in tx.rows_of("SELECT rollout_id FROM rollouts ORDER BY rollout_id", {})]


def refuse(tx: Transaction) -> None:
    add(tx, "ro-refused")
    raise UsageError("no")


async def test_an_operation_that_raises_is_undone_without_the_others(engine: SqliteEngine) -> None:
    writes = [engine.write(lambda tx: add(tx, "ro-1")), engine.write(refuse), engine.write(lambda tx: add(tx, "ro-2"))]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), UsageError, type(None)]
    assert await engine.read(stored) == ["ro-1", "ro-2"]


async def test_a_row_that_the_database_refuses_fails_its_own_operation(engine: SqliteEngine) -> None:
    def twice(tx: Transaction) -> None:
        for _ in range(2):
            tx.run("key_insert", {"idempotency_key": "k", "item": 0, "rollout_id": "r", "fingerprint": ""})

    results = await asyncio.gather(engine.write(twice), engine.write(lambda tx: add(tx, "ro-1")), return_exceptions=True)
    assert isinstance(results[0], ConflictError)
    assert await engine.read(stored) == ["ro-1"]


async def test_signals_of_a_commit_precede_its_answer(engine: SqliteEngine) -> None:
    received: list[int] = []
    engine.subscribe(lambda signals: received.append(signals.claimable))
    await asyncio.gather(engine.write(lambda tx: add(tx, "ro-1")), engine.write(refuse), return_exceptions=True)
    assert sum(received) == 1
    await engine.write(lambda tx: None)
    assert sum(received) == 1
    assert not Signals()


async def test_a_full_disk_refuses_writes_with_the_remedy_until_there_is_room(engine: SqliteEngine) -> None:
    await engine.write(lambda tx: add(tx, "ro-1"))
    pages = await engine.write(lambda tx: int(tx.rows_of("PRAGMA page_count", {})[0][0]))
    await engine.write(lambda tx: tx.rows_of(f"PRAGMA max_page_count={pages}", {}))
    with pytest.raises(DiskFullError, match=r"queue.db cannot be written.*full.*free space"):
        await engine.write(lambda tx: add(tx, "ro-2", "x" * 1_000_000))
    assert await engine.read(stored) == ["ro-1"]
    await engine.write(lambda tx: tx.rows_of("PRAGMA max_page_count=1000000", {}))
    await engine.write(lambda tx: add(tx, "ro-3", "x" * 1_000_000))
    assert await engine.read(stored) == ["ro-1", "ro-3"]


async def test_a_read_sees_every_answered_write(engine: SqliteEngine) -> None:
    for number in range(20):
        await engine.write(lambda tx, name=f"ro-{number:02}": add(tx, name))
        assert len(await engine.read(stored)) == number + 1


async def test_a_cancelled_write_does_not_affect_the_others(engine: SqliteEngine) -> None:
    given_up = engine.write(lambda tx: add(tx, "ro-1"))
    given_up.cancel()
    await engine.write(lambda tx: add(tx, "ro-2"))
    assert "ro-2" in await engine.read(stored)


async def test_writes_before_close_are_done_and_later_ones_refused(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "queue.db")
    writes = [engine.write(lambda tx, name=f"ro-{i}": add(tx, name)) for i in range(50)]
    closing = asyncio.create_task(engine.close())
    await asyncio.gather(*writes)
    await closing
    with pytest.raises(UnavailableError, match="stopping"):
        await engine.write(lambda tx: add(tx, "ro-late"))
    again = SqliteEngine(tmp_path / "queue.db")
    assert len(await again.read(stored)) == 50
    await again.close()


async def test_a_database_has_one_owner_at_a_time(engine: SqliteEngine, tmp_path: Path) -> None:
    with pytest.raises(InUseError, match="locked by another queue service"):
        SqliteEngine(tmp_path / "queue.db")


async def test_an_absolute_path_has_four_slashes_and_a_relative_one_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in ((f"sqlite:///{tmp_path}/a.db", tmp_path / "a.db"), ("sqlite:///b/c.db", tmp_path / "b" / "c.db")):
        engine = open_engine(url)
        assert path.exists()
        await engine.close()


def test_invalid_json_is_refused_before_it_is_stored() -> None:
    """Else every later reader of rollouts would fail on it."""
    for text in ("{", "nope", "[" * 100_000, "\ud7ff{"):
        with pytest.raises(UsageError, match="is no JSON"):
            checks.checked_json(text, "input")
    with pytest.raises(UsageError, match="no JSON object"):
        checks.checked_object("[1]", "metadata")
    assert checks.checked_json("", "input") == "null"


async def test_tables_of_another_release_are_named_as_the_cause(engine: SqliteEngine, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("ALTER TABLE rollouts RENAME COLUMN reason TO other")
    connection.close()
    with pytest.raises(ConflictError, match=r"other tables than this release.*AGL_DATA_DIR"):
        await engine.write(lambda db: enqueue.enqueue(db, pb.EnqueueRequest(rollouts=[pb.NewRollout(input_json="1")]), 1.0))


async def test_a_queue_ends_overdue_attempts_before_its_first_answer(tmp_path: Path) -> None:
    now = 1000.0

    async def serving() -> QueueServer:
        server = QueueServer(open_engine(f"sqlite:///{tmp_path / 'queue.db'}"), clock=lambda: now, sweep_seconds=3600)
        await server.start("127.0.0.1", 0)
        return server

    server = await serving()
    async with QueueClient(server.service.address) as client:
        config = RolloutConfig(unresponsive_seconds=60)
        [rollout] = await client.start([EnqueueRolloutRequest(input=1, config=config)], worker_id="w")
    await server.stop()
    now += 61
    server = await serving()
    async with QueueClient(server.service.address) as client:
        [found], [worker] = await client.query_rollouts(), await client.query_workers()
    await server.stop()
    assert (found.rollout_id, found.status, worker.status) == (rollout.rollout_id, "failed", "unknown")
