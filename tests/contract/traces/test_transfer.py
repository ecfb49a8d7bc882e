"""Traces are copied between engines and through files completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_otel.errors import ConflictError, DataError, UsageError
from agl_otel.traces import transfer
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer

ROWS = 300
SUMMARY = "SELECT * FROM otel.rollout_summary ORDER BY ALL"


class _Once(ChdbEngine):
    """May be closed early."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            super().close()

    closed = False


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceStore]:
    """An embedded store with spans of two days, a log record, and chunks of a size that cuts them."""
    monkeypatch.setattr(transfer, "CHUNK_ROWS", 64)
    made = _Once(tmp_path / "source")
    create_schema(made, where="the test")
    for day in (1, 2):
        rows = [row(day, number) for number in range(ROWS)]
        made.insert("otel.otel_traces", list(rows[0]), ["\n".join(json.dumps(each) for each in rows).encode()])
    made.insert("otel.otel_logs", ["Timestamp", "Body", "RolloutId"], [b'{"Timestamp":"1750000000.000000001","Body":"x","RolloutId":"ro"}'])
    yield made
    made.close()


def row(day: int, number: int) -> dict[str, object]:
    return {
        "Timestamp": f"1750000000.{number:09d}",
        "ReceivedAt": f"2026-01-0{day} 00:00:00.123",
        "TraceId": f"t{day}",
        "SpanId": f"s{number}",
        "RolloutId": f"ro-{number % 7}",
        "SpanAttributes": {"text": "naïve \x00 😀" * (number % 3)},
        "ResponseTokenIds": [1, 2**32 - 1],
        "ResponseLogprobs": [-0.1, 1e-30],
        "Events.Timestamp": ["2026-01-01 00:00:00.000000001"],
        "Events.Name": ["e"],
        "Events.Attributes": [{"k": "v"}],
        "Links.TraceId": ["l"],
        "Links.SpanId": ["m"],
        "Links.TraceState": [""],
        "Links.Attributes": [{}],
        "BatchId": day,
        "BatchPos": number,
    }


@pytest.fixture
def server_engine(server: ClickHouseServer) -> Iterator[TraceStore]:
    """A server with our empty schema. (One process opens one embedded store at a time.)"""
    made = ServerEngine(ServerAddress.parse(server.url()))
    made.command("DROP DATABASE IF EXISTS otel SYNC")
    create_schema(made, where="the test")
    yield made
    made.close()


@pytest.fixture
def dumped(source: TraceStore, tmp_path: Path) -> tuple[Path, dict[str, transfer.Content]]:
    """(folder, what it holds); the store it came from is closed."""
    held = transfer.dump(source, tmp_path / "dump")
    source.close()
    return tmp_path / "dump", held


def move(source: TraceStore, target: TraceStore, progress: transfer.Progress | None = None) -> dict[str, transfer.Content]:
    with transfer.empty_target(target) as filled:
        return transfer.copy(source, filled, progress)


def load(directory: Path, target: TraceStore) -> dict[str, transfer.Content]:
    with transfer.empty_target(target) as filled:
        return transfer.load(directory, filled)


def test_all_rows_arrive_at_a_server_and_the_views_follow(source: TraceStore, server_engine: TraceStore) -> None:
    steps: list[tuple[str, int, int]] = []
    held = move(source, server_engine, lambda *step: steps.append(step))
    assert {table: each.rows for table, each in held.items() if each.rows} == {"otel_traces": 2 * ROWS, "otel_logs": 1}
    assert {table: transfer.content(server_engine, table) for table in transfer.tables(server_engine)} == held
    assert [row[:6] for row in server_engine.select(SUMMARY)] == [row[:6] for row in source.select(SUMMARY)]
    assert steps[-1] == ("otel_traces", 2 * ROWS, 2 * ROWS)


def test_deleted_rows_are_not_copied(source: TraceStore, server_engine: TraceStore, tmp_path: Path) -> None:
    source.command("DELETE FROM otel.otel_traces WHERE RolloutId IN ('ro-0', 'ro-1')")  # more than the first chunk of either day
    left = transfer.content(source, "otel_traces")
    assert 0 < left.rows < 2 * ROWS
    assert transfer.dump(source, tmp_path / "dump")["otel_traces"] == left
    assert move(source, server_engine)["otel_traces"] == left == transfer.content(server_engine, "otel_traces")


def test_a_target_with_traces_is_not_overwritten(source: TraceStore, server_engine: TraceStore) -> None:
    server_engine.insert("otel.otel_logs", ["Body"], [b'{"Body":"mine"}'])
    with pytest.raises(ConflictError, match=r"already holds 1 rows in otel\.otel_logs, and nothing is overwritten"):
        move(source, server_engine)
    assert transfer.content(server_engine, "otel_traces").rows == 0


def test_a_dump_is_restored_on_either_engine(dumped: tuple[Path, dict[str, transfer.Content]], engine: TraceStore, tmp_path: Path) -> None:
    directory, held = dumped
    assert load(directory, engine) == held
    with pytest.raises(ConflictError, match="nothing is overwritten"):
        load(directory, engine)
    assert transfer.dump(engine, tmp_path / "again") == held


def test_a_damaged_or_unfinished_dump_is_refused_before_anything_is_inserted(
    dumped: tuple[Path, dict[str, transfer.Content]], engine: TraceStore
) -> None:
    directory, _ = dumped
    file = next((directory / "otel_traces").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="missing or damaged"):
        load(directory, engine)
    file.unlink()
    with pytest.raises(DataError, match="missing or damaged"):
        load(directory, engine)
    (directory / transfer.MANIFEST).unlink()
    with pytest.raises(UsageError, match="no finished backup"):
        load(directory, engine)
    assert transfer.content(engine, "otel_traces").rows == 0


def test_a_transfer_that_fails_leaves_the_target_empty(source: TraceStore, server_engine: TraceStore) -> None:
    with pytest.raises(DataError, match="the queue's turn"), transfer.empty_target(server_engine) as filled:
        transfer.copy(source, filled)
        raise DataError("the queue's turn")
    assert {transfer.content(server_engine, table).rows for table in (*transfer.tables(server_engine), *transfer.DERIVED)} == {0}
    assert move(source, server_engine)["otel_traces"].rows == 2 * ROWS


def test_rows_written_by_others_meanwhile_are_not_removed(source: TraceStore, server_engine: TraceStore) -> None:
    with pytest.raises(DataError, match="their contents differ"), transfer.empty_target(server_engine) as filled:
        server_engine.insert("otel.otel_logs", ["Body"], [b'{"Body":"mine"}'])
        transfer.copy(source, filled)
    assert server_engine.select("SELECT count() FROM otel.otel_logs WHERE Body = 'mine'") == [[1]]
