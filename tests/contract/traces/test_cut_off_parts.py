"""A disk that refuses writes while the embedded ClickHouse merges: no stored row is lost, and where one may be, it is reported."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_otel.errors import DiskFullError
from agl_otel.traces.chdb import ROOM_BYTES, ChdbEngine
from agl_otel.traces.schema import create_schema
from tests.small_disk import no_file_over

BATCHES = 5
ROWS = 100
TEXT = 1000
TABLE = "otel.otel_traces"
LIMIT = 100_000
"""Bytes: more than the files of one insert have, and less than those of all together."""


def opened(folder: Path) -> ChdbEngine:
    engine = ChdbEngine(folder / "traces")
    create_schema(engine, where="the test")
    return engine


def fill(engine: ChdbEngine) -> None:
    """Insert BATCHES parts of ROWS rows, and leave them unmerged."""
    engine.command(f"SYSTEM STOP MERGES {TABLE}")
    for batch in range(BATCHES):
        insert(engine, batch)


def insert(engine: ChdbEngine, batch: int) -> None:
    rows = [
        {
            "Timestamp": "2026-01-01 00:00:00",
            "TraceId": f"{batch:032x}",
            "SpanId": f"{number:016x}",
            "RolloutId": "ro-1",
            "TraceState": os.urandom(TEXT // 2).hex(),
        }
        for number in range(ROWS)
    ]
    engine.insert(TABLE, list(rows[0]), ["\n".join(map(json.dumps, rows)).encode()])


def merge(engine: ChdbEngine) -> None:
    """Merge all parts into one; the limit on files makes that fail."""
    engine.command(f"SYSTEM START MERGES {TABLE}")
    engine.command(f"OPTIMIZE TABLE {TABLE} FINAL")


def total(engine: ChdbEngine) -> tuple[int, int]:
    """Return (rows, characters) as a reader sees them."""
    answer = engine.read(f"SELECT count(), sum(length(TraceState)) FROM {TABLE}", "JSONCompactEachRow")
    rows, characters = json.loads(answer)
    return rows, characters


def detached_parts(engine: ChdbEngine) -> list[str]:
    return sorted(path.name for path in engine.directory.glob("store/*/*/detached/*"))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ChdbEngine]:
    made = opened(tmp_path)
    yield made
    made.close()


EVERYTHING = (BATCHES * ROWS, BATCHES * ROWS * TEXT)


def test_a_merge_that_the_disk_cut_off_loses_nothing(engine: ChdbEngine, caplog: pytest.LogCaptureFixture) -> None:
    fill(engine)
    with no_file_over(LIMIT):
        with pytest.raises(DiskFullError, match="make room"):
            merge(engine)
        assert total(engine) == EVERYTHING, "readers get answers although the disk is still full"
        assert engine.check_disk(), "it is still reported"
    assert not engine.check_disk(), "merges go on by themselves when there is room"
    merge(engine)
    assert total(engine) == EVERYTHING
    assert engine.select("SELECT count() FROM system.parts WHERE table = 'otel_traces' AND active") == [[1]]
    assert any("in its sources" in record.getMessage() for record in caplog.records)
    assert all(name.startswith("ignored_") for name in detached_parts(engine)), "nothing is deleted"


def test_a_reader_that_finds_a_cut_off_part_first_gets_its_answer(engine: ChdbEngine) -> None:
    fill(engine)
    with no_file_over(LIMIT), engine._write_lock:  # pyright: ignore[reportPrivateUsage] - as a merge in the background, beside all statements
        for sql in (f"SYSTEM START MERGES {TABLE}", f"OPTIMIZE TABLE {TABLE} FINAL"):
            engine._writer.query(sql, "Null", {})  # pyright: ignore[reportPrivateUsage] - as above
    assert total(engine) == EVERYTHING


def test_a_cut_off_insert_is_an_error_and_is_stored_by_its_next_try(engine: ChdbEngine) -> None:
    fill(engine)
    with no_file_over(10_000):
        with pytest.raises(DiskFullError, match="make room"):
            insert(engine, BATCHES)
        assert total(engine) == EVERYTHING
        with pytest.raises(DiskFullError, match="make room"):
            insert(engine, BATCHES)
    insert(engine, BATCHES)
    assert total(engine) == (EVERYTHING[0] + ROWS, EVERYTHING[1] + ROWS * TEXT)
    assert not engine.check_disk()


def test_a_deletion_on_a_full_disk_is_refused(engine: ChdbEngine) -> None:
    fill(engine)
    with no_file_over(LIMIT):
        with pytest.raises(DiskFullError):
            merge(engine)
        with pytest.raises(DiskFullError, match="make room"):
            engine.delete("otel_traces", "RolloutId = {name:String}", {"name": "ro-1"})
    assert total(engine) == EVERYTHING


def test_a_kill_after_a_cut_off_merge_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    fill(first)
    with no_file_over(LIMIT), first._write_lock:  # pyright: ignore[reportPrivateUsage] - as a merge in the background, before it is noticed
        for sql in (f"SYSTEM START MERGES {TABLE}", f"OPTIMIZE TABLE {TABLE} FINAL"):
            first._writer.query(sql, "Null", {})  # pyright: ignore[reportPrivateUsage] - as above
    first.close()
    second = opened(tmp_path)
    assert total(second) == EVERYTHING
    assert not second.check_disk()
    assert any("in its sources" in record.getMessage() for record in caplog.records)
    second.close()


def test_rows_of_a_damaged_part_without_sources_are_reported_until_its_folder_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    fill(first)
    ((path, name),) = first.select("SELECT path, name FROM system.parts WHERE table = 'otel_traces' AND active ORDER BY name LIMIT 1")
    first.close()
    data = Path(str(path)) / "data.bin"
    data.write_bytes(data.read_bytes()[:1000])
    for _ in range(2):  # each start reports it
        caplog.clear()
        engine = opened(tmp_path)
        assert total(engine) == (EVERYTHING[0] - ROWS, EVERYTHING[1] - ROWS * TEXT)
        (problem,) = engine.check_disk()
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        for words in (problem, error.getMessage()):
            assert "otel_traces" in words and str(name) in words and f"{ROWS} rows" in words and "detached" in words
        engine.close()
    engine = opened(tmp_path)
    (folder,) = engine.directory.glob("store/*/*/detached/broken*")
    folder.rename(tmp_path / "examined")
    assert not engine.check_disk()
    engine.close()


def test_less_room_than_any_insert_needs_refuses_it_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path)
    monkeypatch.setattr("agl_otel.traces.chdb.ROOM_BYTES", 1 << 60)
    with pytest.raises(DiskFullError, match="make room"):
        insert(engine, 0)
    assert engine.check_disk() and ROOM_BYTES < 1 << 30
    monkeypatch.undo()
    insert(engine, 0)
    assert total(engine)[0] == ROWS and not engine.check_disk()
    engine.close()


def test_sources_of_merges_outlast_the_interval_between_looks(engine: ChdbEngine) -> None:
    ((lifetime,),) = engine.select("SELECT toUInt32(value) FROM system.merge_tree_settings WHERE name = 'old_parts_lifetime'")
    assert int(str(lifetime)) >= 480
    fill(engine)
    merge(engine)
    ((before,),) = engine.select("SELECT count() FROM system.parts WHERE table = 'otel_traces' AND NOT active")
    assert before == BATCHES
