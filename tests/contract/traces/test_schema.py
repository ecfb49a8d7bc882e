"""The tables: filled by the stock exporter's columns, created twice, refilled after a crash."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agl_otel.errors import ConflictError, UnavailableError
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.engine import DATA_CODES, DATABASE, ClickHouseError
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import VERSION, create_schema
from agl_otel.traces.sql import REFILLS, named_query
from agl_otel_hook import conventions
from tests.clickhouse_server import ClickHouseServer

# What the OpenTelemetry Collector's stock ClickHouse exporter inserts.
STOCK = (
    "Timestamp", "TraceId", "SpanId", "ParentSpanId", "TraceState", "SpanName", "SpanKind", "ServiceName", "ResourceAttributes",
    "ScopeName", "ScopeVersion", "SpanAttributes", "Duration", "StatusCode", "StatusMessage", "Events.Timestamp", "Events.Name",
    "Events.Attributes", "Links.TraceId", "Links.SpanId", "Links.TraceState", "Links.Attributes",
)  # fmt: skip


def stock_row(span: dict[str, str], resource: dict[str, str], **other: Any) -> dict[str, Any]:
    empty = {name: [] if "." in name else "" for name in STOCK}
    row = {**empty, "Timestamp": "1750000000.000000001", "Duration": 5, "TraceId": "t", "SpanId": "s", "StatusCode": "Unset"}
    return {**row, "SpanAttributes": span, "ResourceAttributes": resource, **other}


def insert(engine: TraceStore, *rows: dict[str, Any]) -> None:
    engine.insert("otel.otel_traces", STOCK, ["\n".join(json.dumps(row) for row in rows).encode()])


R, A, S = conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID


@pytest.mark.parametrize(
    ("span", "resource", "expected"),
    [
        ({R: "ro-1", A: "at-1", S: "7"}, {}, ["ro-1", "at-1", 7]),
        ({}, {R: "ro-1", A: "at-1", S: "7"}, ["ro-1", "at-1", 7]),
        ({R: "ro-1", A: "at-1"}, {R: "ro-2", A: "at-2"}, ["ro-1", "at-1", 0]),
        ({R: "ro-1"}, {R: "ro-1", A: "at-1"}, ["ro-1", "at-1", 0]),
        ({R: "ro-1"}, {R: "ro-2", A: "at-2"}, ["ro-1", "", 0]),
        ({A: "at-1"}, {R: "ro-2", A: "at-2"}, ["ro-2", "at-2", 0]),
        ({}, {}, ["", "", 0]),
    ],
)
def test_the_stock_exporters_rows_get_their_ids_by_default(
    span: dict[str, str], resource: dict[str, str], expected: list[Any], engine: TraceStore
) -> None:
    insert(engine, stock_row(span, resource))
    assert engine.select("SELECT RolloutId, AttemptId, SequenceId FROM otel.otel_traces") == [expected]


def test_the_stock_exporters_rows_get_their_token_columns_by_default(engine: TraceStore) -> None:
    span = {
        conventions.LLM_PROMPT_TOKEN_IDS: "[1,2,3]",
        conventions.LLM_RESPONSE_TOKEN_IDS: "[70000]",
        conventions.LLM_RESPONSE_LOGPROBS: "[-0.5]",
    }
    insert(engine, stock_row(span, {}))
    assert engine.select("SELECT PromptTokenIds, ResponseTokenIds, ResponseLogprobs FROM otel.otel_traces") == [
        [[1, 2, 3], [70000], [-0.5]]
    ]


VERSIONS = "SELECT DISTINCT Version FROM otel.agl_migrations"


def test_the_schema_is_created_once_and_again_without_harm(engine: TraceStore) -> None:
    assert not create_schema(engine, where="again")
    engine.command("TRUNCATE TABLE otel.agl_migrations")  # as after a crash: the tables are there, their version is not recorded
    assert create_schema(engine, where="again")
    assert engine.select(VERSIONS) == [[VERSION]]


@pytest.mark.parametrize("other", [2, 99])
def test_data_of_another_schema_is_refused(other: int, engine: TraceStore) -> None:
    engine.command("TRUNCATE TABLE otel.agl_migrations")
    engine.insert("otel.agl_migrations", ["Version", "Name"], [f'{{"Version":{other},"Name":"other"}}'.encode()])
    with pytest.raises(
        ConflictError, match=f"/data have schema {other}, and this release of agl-otel has schema {VERSION}: use the release"
    ):
        create_schema(engine, where="/data")
    assert engine.select(VERSIONS) == [[other]]


VIEWS = {
    "otel.otel_traces_trace_id_ts": "SELECT TraceId, RolloutId, min(Start), max(End) FROM otel.otel_traces_trace_id_ts "
    "GROUP BY ALL ORDER BY ALL",
    "otel.rollout_summary_states": "SELECT * FROM otel.rollout_summary ORDER BY ALL",
    "otel.services": "SELECT ServiceName, SpanName, SpanKind, min(FirstTime), max(LastTime) FROM otel.services GROUP BY ALL ORDER BY ALL",
}


def views(engine: TraceStore) -> dict[str, list[list[object]]]:
    return {table: engine.select(sql) for table, sql in VIEWS.items()}


def spans(engine: TraceStore) -> None:
    tokens = {conventions.LLM_PROMPT_TOKEN_IDS: "[1,2]", conventions.LLM_RESPONSE_TOKEN_IDS: "[3]"}
    insert(
        engine,
        stock_row({R: "ro-1", A: "at-1", **tokens}, {}, SpanId="a", ServiceName="x", SpanName="chat"),
        stock_row({R: "ro-1", A: "at-1", **tokens}, {}, SpanId="b", ServiceName="x", SpanName="chat", StatusCode="Error"),
        stock_row({R: "ro-2", A: "at-2"}, {}, SpanId="c", TraceId="u", Timestamp="1750000009.000000001"),
        stock_row({}, {}, SpanId="d"),
    )


def test_the_summary_counts_each_identity_once_however_often_it_is_stored(engine: TraceStore) -> None:
    spans(engine)
    once = views(engine)
    assert [row[:6] for row in once["otel.rollout_summary_states"]] == [["ro-1", "at-1", 2, 1, 4, 2], ["ro-2", "at-2", 1, 0, 0, 0]]
    spans(engine)
    assert views(engine) == once


def test_refilling_equals_the_views_output(engine: TraceStore) -> None:
    spans(engine)
    made = views(engine)
    for table in VIEWS:
        engine.command(f"TRUNCATE TABLE {table}")
    assert views(engine) != made
    for name in REFILLS:
        engine.command(named_query(name), {"batch": 0})
    assert views(engine) == made


def test_one_insert_makes_one_part_whatever_the_spans_times(engine: TraceStore) -> None:
    insert(engine, *(stock_row({}, {}, SpanId=str(n), Timestamp=f"{1_000_000_000 + n * 86400}.000000000") for n in range(500)))
    assert engine.select("SELECT count() FROM system.parts WHERE database = 'otel' AND table = 'otel_traces' AND active") == [[1]]
    assert engine.select("SELECT count() FROM system.parts WHERE database = 'otel' AND table = 'otel_traces_trace_id_ts' AND active") == [
        [1]
    ]


def test_an_error_carries_clickhouses_code(engine: TraceStore) -> None:
    with pytest.raises(ClickHouseError) as failure:
        engine.insert("otel.otel_traces", ["Timestamp"], [b'{"Timestamp":"nonsense"}'])
    assert failure.value.is_data_error
    with pytest.raises(ClickHouseError) as failure:
        engine.select("SELECT * FROM otel.nothere")
    assert (failure.value.code, failure.value.is_data_error) == (60, False)


@pytest.mark.full
def test_a_server_that_is_ending_is_away(server: ClickHouseServer) -> None:
    engine = ServerEngine(ServerAddress.parse(server.url()))
    engine.command(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    error = "throwIf(1, 'The server is shutting down due to a fatal error', toInt16(236))"
    ending = f"SELECT {error} SETTINGS allow_custom_error_code_in_throwif = 1"
    for ask in (lambda: engine.command(ending), lambda: engine.read(ending, "TSV")):
        with pytest.raises(UnavailableError, match=r"is ending: Code: 236.*shutting down"):
            ask()
    engine.close()


def test_the_data_error_codes_have_clickhouses_names(engine: TraceStore) -> None:
    rows = engine.select("SELECT number, errorCodeToName(number) FROM numbers(2000) WHERE has({codes:Array(UInt64)}, number)",
                         {"codes": list(DATA_CODES)})  # fmt: skip
    assert {int(str(number)): name for number, name in rows} == DATA_CODES


def test_every_table_is_on_disk_when_an_insert_returns_and_when_a_merge_ends(engine: TraceStore) -> None:
    """Those that views write too: recovery refills them for the batches that are still in the log, and no others."""
    rows = engine.select(
        "SELECT name FROM system.tables WHERE database = 'otel' AND engine LIKE '%MergeTree' AND NOT (position(create_table_query, "
        "'fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1') > 0)"
    )
    assert rows == []


def test_the_file_system_is_not_readable_as_a_database(engine: TraceStore) -> None:
    with pytest.raises(ClickHouseError):
        engine.read("SELECT * FROM default.`/etc/hostname`", "TSV")


SCHEMA = "SELECT name, create_table_query FROM system.tables WHERE database = 'otel' AND name != 'agl_migrations' ORDER BY name"


def test_both_engines_have_the_same_schema(server: ClickHouseServer, tmp_path: Path) -> None:
    found: list[list[list[object]]] = []
    for engine in (ServerEngine(ServerAddress.parse(server.url())), ChdbEngine(tmp_path / "traces")):
        engine.command("DROP DATABASE IF EXISTS otel SYNC")
        create_schema(engine, where="the test")
        found.append(engine.select(SCHEMA))
        engine.close()
    assert found[0] == found[1]


def test_several_processes_create_the_schema_of_a_server_at_once(server: ClickHouseServer) -> None:
    engines = [ServerEngine(ServerAddress.parse(server.url())) for _ in range(4)]
    engines[0].command("DROP DATABASE IF EXISTS otel SYNC")
    with ThreadPoolExecutor(len(engines)) as threads:
        created = list(threads.map(lambda engine: create_schema(engine, where="the test"), engines))
    assert any(created)
    assert engines[0].select(VERSIONS) == [[VERSION]]
    assert engines[0].select("SELECT count() FROM system.tables WHERE database = 'otel' AND engine = 'MaterializedView'") == [[3]]
    for engine in engines:
        engine.close()
