"""A request that ends the collector at each insert is tried alone, then becomes a dead letter; nothing else is held up for ever."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

from agl_otel.collector import store_batch
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Batch, Member, Request
from agl_otel.collector.recovery import DEATHS, FILE, Recovery
from agl_otel.collector.store_batch import BatchStore
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.schema import create_schema

from .otlp import post_spans, request_of, span
from .stack import Stack

KILLED_BY_POISON = """
import os, signal, sys
from agl_otel.collector.__main__ import main
from agl_otel.traces.chdb import ChdbEngine
insert = ChdbEngine.insert
def killed(self, table, columns, rows, **options):
    rows = list(rows)
    if b"poison" in b"".join(rows):
        os.kill(os.getpid(), signal.SIGKILL)
    insert(self, table, columns, rows, **options)
ChdbEngine.insert = killed
sys.exit(main())
"""


async def status(stack: Stack) -> Mapping[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.http}/status") as response:
        return await response.json()


def request_in(file: str) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(Path(file).read_bytes())


@pytest.mark.full
async def test_a_request_that_kills_the_collector_is_a_dead_letter_after_some_starts(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector("-c", KILLED_BY_POISON)
    bad = request_of([span("poison")], {"agentlightning.rollout_id": "ro-bad", "agentlightning.attempt_id": "at-1"})
    await post_spans(own_stack, bad)
    own_stack.processes["collector"].wait(60)
    for _ in range(1 + DEATHS):
        process = own_stack.spawn("collector", "-c", KILLED_BY_POISON)
        assert process.wait(60) == -signal.SIGKILL
    await own_stack.start_collector("-c", KILLED_BY_POISON)
    await post_spans(own_stack, request_of([span("good")], {"agentlightning.rollout_id": "ro-good"}), ack="stored")
    async with own_stack.reader() as reader:
        assert [len(await reader.spans([each])) for each in ("ro-bad", "ro-good")] == [0, 1]
    kept = (await status(own_stack))["kept_aside"]
    (named,) = kept["latest"]
    assert (kept["requests"], named["rollouts"]) == (1, ["ro-bad"])
    assert f"{DEATHS} starts of the collector died" in named["reason"]
    assert request_in(named["file"]) == bad


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path / "traces")
    create_schema(made, where="the test")
    yield made
    made.close()


def members(*poisoned: int) -> list[Member]:
    received = int(time.time() * 1000)
    found: list[Member] = []
    for position in range(3):
        spans = [span(f"{'poison' if position in poisoned else 'good'}-{position}-{n}") for n in range(4)]
        found.append(
            (position, Request("traces", received, Identities([(4, Identity("ro-1", "at-1"))]), request_of(spans).SerializeToString()))
        )
    records = [LogRecord(time_unix_nano=time.time_ns(), body=AnyValue(string_value="said"))]
    logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])]).SerializeToString()
    return [*found, (3, Request("logs", received, Identities.of([Identity("ro-1", "at-1")]), logs))]


def died(directory: Path, **left: Any) -> None:
    (directory / FILE).write_text(json.dumps({"batch": 77, **left}))


BATCH = Batch(77, 0, 3, {"ro-1": 10})


def test_a_batch_on_which_a_start_has_died_is_stored_piece_by_piece(
    engine: ChdbEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_batch, "PIECE_BYTES", 1)
    store = BatchStore(engine, tmp_path / "refused")
    given = members()
    store.store(BATCH, given[:1], in_doubt=False)  # the part that was stored before
    died(tmp_path)
    Recovery(store, tmp_path).store(BATCH, given)
    rows = engine.select("SELECT SpanName, SequenceId, BatchPos FROM otel.otel_traces ORDER BY BatchPos")
    assert rows == [[f"good-{at // 4}-{at % 4}", 10 + at, at] for at in range(12)]
    assert engine.select("SELECT Body, BatchPos FROM otel.otel_logs") == [["said", 0]]
    assert not (tmp_path / FILE).exists() and store.counts["refused"] == 0


def test_one_death_makes_no_dead_letter_and_two_do(engine: ChdbEngine, tmp_path: Path) -> None:
    store = BatchStore(engine, tmp_path / "refused")
    died(tmp_path, apart=True, at=1, deaths={"1": DEATHS - 1})
    Recovery(store, tmp_path).store(BATCH, members(1))
    assert engine.select("SELECT count() FROM otel.otel_traces") == [[8]]
    assert store.counts["refused"] == 1
    assert [json.loads(path.read_text())["reason"] for path in (tmp_path / "refused").glob("*.json")] == [
        f"{DEATHS} starts of the collector died while they stored it alone"
    ]


def test_an_insert_that_fails_without_dying_counts_no_death(engine: ChdbEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(engine, tmp_path / "refused")

    def away(*_: object, **__: object) -> None:
        raise ClickHouseError("Code: 210. DB::Exception: away")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "insert", away)
        for apart in (False, True):
            if apart:
                died(tmp_path)
            with pytest.raises(ClickHouseError, match="away"):
                Recovery(store, tmp_path).store(BATCH, members())
            assert (tmp_path / FILE).exists() is apart
    assert json.loads((tmp_path / FILE).read_text())["deaths"] == {}
    Recovery(store, tmp_path).store(BATCH, members())
    assert engine.select("SELECT count() FROM otel.otel_traces") == [[12]]


def test_an_unreadable_note_or_one_of_another_batch_is_ignored(engine: ChdbEngine, tmp_path: Path) -> None:
    store, given = BatchStore(engine, tmp_path / "refused"), members()
    for text in ("{", "[]", json.dumps({"batch": 5, "apart": True, "at": 0, "deaths": {"0": 9}})):
        (tmp_path / FILE).write_text(text)
        Recovery(store, tmp_path).store(BATCH, given)
        assert not (tmp_path / FILE).exists()
    assert engine.select("SELECT count() FROM otel.otel_traces") == [[12]]
