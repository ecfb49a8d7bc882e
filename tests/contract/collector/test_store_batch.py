"""Batches into a real chdb: stored rows are looked up, and rejected requests become dead letters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from agl_otel.collector.core import Core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Batch, Request
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.values import REPEATED
from agl_otel.errors import DiskFullError
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.schema import create_schema
from tests.cores import both_cores
from tests.small_disk import no_file_over

from .otlp import attributes, request_of, span


class FailingEngine:
    """A real engine that rejects rows with a certain text, like ClickHouse with rows it cannot parse, or fails after an insert."""

    def __init__(self, engine: ChdbEngine, *, poison: bytes = b"", fails_after_insert: int = 0) -> None:
        self._engine = engine
        self._poison = poison
        self._fails = fails_after_insert
        self.cluster = engine.cluster
        self.embedded = engine.embedded
        self.command = engine.command
        self.select = engine.select
        self.delete = engine.delete
        self.close = engine.close

    def insert(
        self, table: str, columns: Sequence[str], rows: Iterable[bytes], *, format_name: str = "JSONEachRow", token: str = ""
    ) -> None:
        data = b"".join(rows)
        self._check(data)
        self._engine.insert(table, columns, [data], format_name=format_name, token=token)
        self._fail()

    def _check(self, data: bytes) -> None:
        if self._poison and self._poison in data:
            raise ClickHouseError("Code: 27. DB::Exception: Cannot parse input")

    def _fail(self) -> None:
        if self._fails:
            self._fails -= 1
            raise ClickHouseError("Code: 241. DB::Exception: Memory limit exceeded while pushing to view")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path / "traces")
    create_schema(made, where="the test")
    yield made
    made.close()


def member(position: int, *names: str, reason: str = "") -> tuple[int, Request]:
    raw = request_of([span(name) for name in names]).SerializeToString()
    identities = [Identity("ro-1", "at-1", None, reason if n == 0 else "") for n in range(len(names))]
    return position, Request("traces", int(time.time() * 1000), Identities.of(identities), raw)


def stored(engine: ChdbEngine) -> list[list[object]]:
    return engine.select("SELECT SpanName, SequenceId, BatchPos FROM otel.otel_traces ORDER BY BatchPos")


@both_cores
def test_a_batch_that_is_stored_again_is_stored_once(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    batch = Batch(77, 0, 4, {"ro-1": 10})
    members = [member(0, "a", "b"), member(4, "c")]
    store.store(batch, members, in_doubt=False)
    store.store(batch, members, in_doubt=True)
    assert stored(engine) == [["a", 10, 0], ["b", 11, 1], ["c", 12, 2]]
    assert (store.counts["rows"], store.counts["recovered"]) == (3, 0)


@both_cores
def test_recovery_inserts_what_is_missing_with_the_same_numbers(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    batch = Batch(77, 0, 4, {"ro-1": 10})
    members = [member(0, "a", "b"), member(4, "c")]
    store.store(batch, members, in_doubt=False)
    engine.command("ALTER TABLE otel.otel_traces DELETE WHERE BatchPos = 1 SETTINGS mutations_sync = 1")
    store.store(batch, members, in_doubt=True)
    assert stored(engine) == [["a", 10, 0], ["b", 11, 1], ["c", 12, 2]]
    assert store.counts["recovered"] == 1


@both_cores
def test_a_batch_whose_token_clickhouse_noted_without_the_rows_is_stored(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    batch, members = Batch(77, 0, 0, {"ro-1": 10}), [member(0, "a", "b")]
    store.store(batch, members, in_doubt=False)
    engine.command("ALTER TABLE otel.otel_traces DELETE WHERE 1 SETTINGS mutations_sync = 1")
    store.store(batch, members, in_doubt=True)
    assert stored(engine) == [["a", 10, 0], ["b", 11, 1]]
    store.store(batch, members, in_doubt=True)
    assert len(stored(engine)) == 2


@both_cores
def test_an_insert_that_failed_after_storing_is_not_repeated(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(FailingEngine(engine, fails_after_insert=1), tmp_path / "refused", used_core)
    batch, members = Batch(77, 0, 0, {"ro-1": 1}), [member(0, "a", "b")]
    with pytest.raises(ClickHouseError):
        store.store(batch, members, in_doubt=False)
    store.store(batch, members, in_doubt=True)
    assert len(stored(engine)) == 2


@both_cores
def test_an_insert_that_reports_success_but_stores_nothing_is_tried_again(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    batch, members = Batch(77, 0, 0, {"ro-1": 1}), [member(0, "a", "b")]
    engine.command("ALTER TABLE otel.otel_traces MODIFY SETTING min_free_disk_bytes_to_perform_insert = 1000000000000000")  # a full disk
    with pytest.raises(ClickHouseError) as refused:
        store.store(batch, members, in_doubt=False)
    assert not refused.value.is_data_error
    engine.command("ALTER TABLE otel.otel_traces RESET SETTING min_free_disk_bytes_to_perform_insert")
    store.store(batch, members, in_doubt=True)
    assert [name for name, _, _ in stored(engine)] == ["a", "b"]


@both_cores
def test_only_the_request_with_bad_rows_becomes_a_dead_letter(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(FailingEngine(engine, poison=b"poison"), tmp_path / "refused", used_core)
    members = (
        [member(n, f"good-{n}") for n in range(5)] + [member(5, "poison", "its neighbour")] + [member(n, f"good-{n}") for n in range(6, 9)]
    )
    store.store(Batch(77, 0, 8, {"ro-1": 1}), members, in_doubt=False)
    assert [name for name, _, _ in stored(engine)] == [f"good-{n}" for n in (0, 1, 2, 3, 4, 6, 7, 8)]
    assert [number for _, number, _ in stored(engine)] == [1, 2, 3, 4, 5, 8, 9, 10]
    assert store.counts["refused"] == 1
    (kept,) = (tmp_path / "refused").glob("*.otlp")
    assert kept.read_bytes() == members[5][1].raw
    assert "Cannot parse input" in kept.with_suffix(".json").read_text()


@both_cores
def test_a_request_that_cannot_be_decoded_blocks_no_other(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    _, broken = member(1, "x")
    damaged = Request("traces", broken.received_ms, Identities(), broken.raw)  # its identities do not match its spans
    store.store(Batch(77, 0, 2, {"ro-1": 1}), [member(0, "a"), (1, damaged), member(2, "b")], in_doubt=False)
    assert [name for name, _, _ in stored(engine)] == ["a", "b"]
    assert store.counts["refused"] == 1


@both_cores
def test_spans_that_were_rejected_at_receipt_leave_no_row_and_take_no_number(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    store.store(Batch(77, 0, 1, {"ro-1": 1}), [member(0, "bad", "a", reason="why"), member(1, "b")], in_doubt=False)
    assert stored(engine) == [["a", 1, 0], ["b", 2, 1]]


@both_cores
def test_repeated_keys_are_counted(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    request = request_of([span()], {"k": 1})
    group = request.resource_spans[0]
    group.resource.attributes.extend(attributes({"k": 2}))
    group.scope_spans[0].spans[0].attributes.extend([*attributes({"k": 2}), *attributes({"k": 3}), *attributes({"k": b""})])
    store = BatchStore(engine, tmp_path / "refused", used_core)
    member = (0, Request("traces", int(time.time() * 1000), Identities.of([Identity("ro", "at", 1)]), request.SerializeToString()))
    for in_doubt in (False, True):
        store.store(Batch(77, 0, 0), [member], in_doubt=in_doubt)
        assert store.counts[REPEATED] == 3


@both_cores
def test_a_part_that_a_full_disk_cut_off_is_inserted_again(engine: ChdbEngine, tmp_path: Path, used_core: Core) -> None:
    store = BatchStore(engine, tmp_path / "refused", used_core)
    batch, members = Batch(time.time_ns() // 1_000_000 << 22, 0, 0, {"ro-1": 1}), [member(0, "a", "b")]
    with no_file_over(100):
        for in_doubt in (False, True):
            with pytest.raises(DiskFullError):
                store.store(batch, members, in_doubt=in_doubt)
            assert stored(engine) == [], "readers get answers"
    store.store(batch, members, in_doubt=True)
    assert [name for name, _, _ in stored(engine)] == ["a", "b"]
    assert engine.select("SELECT uniq(TraceId) FROM otel.otel_traces_trace_id_ts") == [[2]]
