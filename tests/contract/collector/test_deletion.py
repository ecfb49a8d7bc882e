"""Deleting rollouts: on a real chdb and a real server, and with the commands on a running queue and collector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from agl_otel.collector import orphans
from agl_otel.collector.deletion import TABLES, TRACE_TIMES, Deletion
from agl_otel.maintain.maintainer import maintainer
from agl_otel.queue.client import QueueClient, RolloutUpdate
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.cluster import LOCAL, on_every_node, stored_as
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import create_schema
from agl_otel.types import EnqueueRolloutRequest
from agl_otel_hook import conventions
from tests.clickhouse_cluster import EachShard
from tests.clickhouse_server import ClickHouseServer
from tests.command import run_command
from tests.contract.queue.conftest import postgres  # noqa: F401  # pyright: ignore[reportUnusedImport] - a fixture
from tests.postgres_server import Postgres

from .otlp import post_spans, request_of, span
from .stack import Stack, start


@pytest.fixture(params=["chdb", pytest.param("server", marks=pytest.mark.full), pytest.param("cluster", marks=pytest.mark.full)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TraceStore]:
    with contextlib.ExitStack() as closers:
        if request.param == "cluster":
            made: TraceStore = EachShard(request.getfixturevalue("shards"))
        elif request.param == "chdb":
            made = ChdbEngine(tmp_path / "traces")
            create_schema(made, where="the test")
        else:
            server = closers.enter_context(ClickHouseServer(tmp_path / "server"))
            made = ServerEngine(ServerAddress.parse(server.url()))
            create_schema(made, where="the test")
        closers.callback(made.close)
        yield made


def fill(engine: TraceStore) -> None:
    """Insert ro-1 to ro-3 with two spans and a log record each; the second span and the record came without ids and were copied later."""
    common = {"Timestamp": "1750000000.000000001", "AttemptId": "at-1"}
    for number in (1, 2, 3):
        name, trace = f"ro-{number}", f"t{number}"
        spans = [{**common, "TraceId": trace, "SpanId": f"s{place}", "RolloutId": name, "BatchPos": place} for place in (1, 2)]
        late = {**spans[1], "RolloutId": "", "AttemptId": ""}
        nobody = {**late, "SpanId": "s3", "BatchPos": 3}
        log = {**common, "TraceId": trace, "SpanId": "s2", "Body": "x", "RolloutId": name, "BatchId": 7, "BatchPos": number}
        late_log = {**log, "RolloutId": "", "AttemptId": ""}
        others = [{**late_log, "Body": "y"}, {**late_log, "BatchId": 8}]
        gauge = {"TimeUnix": "1750000000.000000001", "MetricName": "m", "RolloutId": name, "AttemptId": "at-1"}
        for table, rows in (
            ("otel_traces", [*spans, late, nobody]),
            ("otel_logs", [log, late_log, *others]),
            ("otel_metrics_gauge", [gauge]),
        ):
            engine.insert(f"otel.{table}", list(rows[0]), ["\n".join(json.dumps(row) for row in rows).encode()])


def stored(engine: TraceStore) -> dict[str, list[list[object]]]:
    asked = {
        "otel_traces": "SELECT TraceId, SpanId, RolloutId FROM otel.otel_traces ORDER BY ALL",
        "otel_logs": "SELECT TraceId, Body, BatchId, RolloutId FROM otel.otel_logs ORDER BY ALL",
        "summary": "SELECT RolloutId, Spans FROM otel.rollout_summary ORDER BY ALL",
        "gauge": "SELECT RolloutId FROM otel.otel_metrics_gauge ORDER BY ALL",
    }
    return {name: engine.select(sql) for name, sql in asked.items()}


async def test_all_rows_of_a_rollout_are_deleted_and_no_others(engine: TraceStore) -> None:
    fill(engine)
    deletion = Deletion(engine)
    before = stored(engine)
    assert await deletion.run([]) == {}
    assert await deletion.run(["ro-none", ""]) == {}
    assert stored(engine) == before
    removed = await deletion.run(["ro-1", "ro-3"])
    assert removed == {"otel_metrics_gauge": 2, "otel_logs": 2, "rollout_summary_states": 2, "otel_traces": 4}
    assert stored(engine) == {
        "otel_traces": [["t1", "s3", ""], ["t2", "s1", "ro-2"], ["t2", "s2", ""], ["t2", "s2", "ro-2"], ["t2", "s3", ""], ["t3", "s3", ""]],
        "otel_logs": [
            ["t1", "x", 8, ""], ["t1", "y", 7, ""],
            ["t2", "x", 7, ""], ["t2", "x", 7, "ro-2"], ["t2", "x", 8, ""], ["t2", "y", 7, ""],
            ["t3", "x", 8, ""], ["t3", "y", 7, ""],
        ],
        "summary": [["ro-2", 2]],
        "gauge": [["ro-2"]],
    }  # fmt: skip
    assert await deletion.run(["ro-1", "ro-3"]) == {}


async def test_an_interrupted_deletion_is_finished_by_the_next(engine: TraceStore) -> None:
    fill(engine)
    engine.delete("otel_traces", "RolloutId = '' AND TraceId = {trace:String} AND SpanId = {span:String}", {"trace": "t1", "span": "s2"})
    engine.delete("otel_logs", "RolloutId = {rollout:String}", {"rollout": "ro-2"})
    assert (await Deletion(engine).run(["ro-1", "ro-2", "ro-3"]))["otel_traces"] == 6
    assert {row[2] for row in stored(engine)["otel_traces"]} == {""}
    assert {row[1] for row in stored(engine)["otel_traces"]} == {"s3"}


def names(engine: TraceStore) -> list[list[object]]:
    return engine.select("SELECT DISTINCT ServiceName, SpanName FROM otel.services ORDER BY ALL")


def traces_timed(engine: TraceStore) -> list[object]:
    return [row[0] for row in engine.select("SELECT DISTINCT TraceId FROM otel.otel_traces_trace_id_ts ORDER BY ALL")]


def insert(engine: TraceStore, *rows: dict[str, object]) -> None:
    common = {"Timestamp": "1750000000.000000001", "AttemptId": "at-1", "SpanId": "s"}
    lines = "\n".join(json.dumps({**common, **row}) for row in rows)
    engine.insert("otel.otel_traces", [*common, *rows[0]], [lines.encode()])


async def test_names_and_times_of_only_a_deleted_rollout_are_deleted_with_it(engine: TraceStore) -> None:
    jane, joint = {"SpanName": "look up Jane", "ServiceName": "agent"}, {"SpanName": "work", "ServiceName": "agent"}
    insert(
        engine,
        {"RolloutId": "ro-1", "TraceId": "t1", **jane},
        {"RolloutId": "ro-1", "TraceId": "t2", **joint},
        {"RolloutId": "ro-2", "TraceId": "t2", **joint},
        {"RolloutId": "ro-2", "TraceId": "t3", **joint},
    )
    assert (names(engine), traces_timed(engine)) == ([["agent", "look up Jane"], ["agent", "work"]], ["t1", "t2", "t3"])
    await Deletion(engine).run(["ro-1"])
    assert (names(engine), traces_timed(engine)) == ([["agent", "work"]], ["t2", "t3"])
    assert engine.select("SELECT count() FROM otel.otel_traces_trace_id_ts WHERE RolloutId = 'ro-1'") == [[0]]
    insert(engine, {"RolloutId": "ro-3", "TraceId": "t1", **jane})
    assert (names(engine), traces_timed(engine)) == ([["agent", "look up Jane"], ["agent", "work"]], ["t1", "t2", "t3"])


@pytest.mark.parametrize("per_statement", [1, 1000])
async def test_sums_of_deleted_spans_are_deleted_and_those_of_new_spans_rebuilt(
    engine: TraceStore, per_statement: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "ORPHANS_PER_STATEMENT", per_statement)
    for name in ("ro-1", "ro-2", "ro-3"):
        insert(engine, {"RolloutId": name, "TraceId": name, "SpanName": f"of {name}", "ServiceName": "agent"})
    engine.delete("otel_traces", "RolloutId != 'ro-2'", {})  # like parts dropped after the retention time: their sums stay
    assert len(names(engine)) == len(stored(engine)["summary"]) == 3
    both = (orphans.SERVICES, orphans.ROLLOUTS)
    assert orphans.forget(engine, both) == 4
    assert (names(engine), stored(engine)["summary"]) == ([["agent", "of ro-2"]], [["ro-2", 1]])
    for each in both:  # its span was missing when orphans were looked for
        orphans.remove(engine, each, [row[0] for row in engine.select(f"SELECT DISTINCT {each.hashed} FROM otel.{each.table}")])
    assert (names(engine), stored(engine)["summary"]) == ([["agent", "of ro-2"]], [["ro-2", 1]])
    assert orphans.forget(engine, both) == 0
    table = stored_as("services", engine.cluster)
    asked = f"SELECT 1 FROM system.parts WHERE database = 'otel' AND table = '{table}' AND active AND has_lightweight_delete"
    masked = on_every_node(asked, engine.cluster)
    assert engine.select(masked) != []
    await Deletion(engine).purge()
    assert engine.select(masked) == [], "the parts are written anew"
    assert (names(engine), stored(engine)["summary"]) == ([["agent", "of ro-2"]], [["ro-2", 1]])


async def test_spans_sent_after_a_deletion_are_stored(engine: TraceStore) -> None:
    fill(engine)
    await Deletion(engine).run(["ro-1", "ro-2", "ro-3"])
    fill(engine)
    assert stored(engine)["summary"] == [["ro-1", 2], ["ro-2", 2], ["ro-3", 2]]


def test_every_table_of_rollouts_is_cleared(engine: TraceStore) -> None:
    found = engine.select(
        "SELECT c.table FROM system.columns AS c INNER JOIN system.tables AS t ON c.table = t.name AND c.database = t.database "
        "WHERE c.database = 'otel' AND c.name = 'RolloutId' AND t.engine LIKE '%MergeTree'"
    )
    assert {str(row[0]).removesuffix(LOCAL) for row in found} == {*TABLES, TRACE_TIMES}
    assert TABLES[-1] == "otel_traces"


async def agl(stack: Stack, *arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and everything that it printed."""
    environment = {**os.environ, **stack.settings.environment(), "AGL_STORE": stack.queue}
    done = await asyncio.to_thread(run_command, arguments, environment)
    return done.returncode, (done.stdout + done.stderr).strip()


async def one_rollout(stack: Stack, name: str) -> None:
    """Create a finished rollout with an attempt span, a child that arrived before it, and the child's copy."""
    async with QueueClient(stack.queue) as queue:
        await queue.enqueue([EnqueueRolloutRequest(input=1, rollout_id=name)])
        await queue.update_rollouts([RolloutUpdate(rollout_id=name, status="failed")])
    trace = os.urandom(16)
    root = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: name, conventions.ATTEMPT_ID: "at-1"}, trace=trace)
    for sent in (span("child", trace=trace, parent=root.span_id), root):
        await post_spans(stack, request_of([sent]), ack="stored")
    async with maintainer(stack.settings) as made:
        await made.once()
        await made.release()


async def rows(stack: Stack, name: str) -> tuple[int, int]:
    """Count the spans of a rollout, and the spans without one."""
    async with stack.reader() as reader:
        found = await reader.query(
            "SELECT countIf(RolloutId = {name:String}) AS a, countIf(RolloutId = '') AS b FROM otel_traces", params={"name": name}
        )
    return int(found[0]["a"]), int(found[0]["b"])


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def on_each_queue(request: pytest.FixtureRequest, own_stack: Stack) -> Stack:
    """The test's own stack, on each engine of the queue."""
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        own_stack.settings = own_stack.settings.model_copy(update={"queue_url": server.new_schema()})
    return own_stack


@pytest.mark.full
async def test_the_commands_delete_from_both_stores(on_each_queue: Stack) -> None:
    own_stack = on_each_queue
    await start(own_stack)
    for name in ("ro-1", "ro-2", "ro-3"):
        await one_rollout(own_stack, name)
    assert await rows(own_stack, "ro-1") == (2, 3)
    assert await agl(own_stack, "rollouts", "delete", "ro-1", "--yes") == (0, "deleted 1 rollouts")
    assert await rows(own_stack, "ro-1") == (0, 2)
    code, text = await agl(own_stack, "rollouts", "delete", "ro-2", "--json", "--keep-spans")
    assert (code, json.loads(text)) == (0, {"deleted": 1})
    assert await rows(own_stack, "ro-2") == (2, 2)
    assert await agl(own_stack, "rollouts", "delete", "ro-2", "--yes") == (0, "deleted 0 rollouts"), "what is left can be deleted later"
    assert await rows(own_stack, "ro-2") == (0, 1)
    assert await agl(own_stack, "rollouts", "prune", "--older-than", "0s") == (0, "removed 1 rollouts")
    assert await rows(own_stack, "ro-3") == (0, 0)


@pytest.mark.full
async def test_nothing_is_deleted_while_the_collector_is_unavailable(own_stack: Stack) -> None:
    await start(own_stack)
    await one_rollout(own_stack, "ro-1")
    await own_stack.end("collector", 9)  # the queue is not notified
    for command in (("rollouts", "delete", "ro-1", "--yes"), ("queue", "prune", "--older-than", "0s")):
        code, text = await agl(own_stack, *command)
        assert code == 1
        assert "nothing was deleted" in text
        assert "--keep-spans" in text
    async with QueueClient(own_stack.queue) as queue:
        assert [r.rollout_id for r in await queue.query_rollouts()] == ["ro-1"]
    await own_stack.start_collector()
    assert await agl(own_stack, "rollouts", "delete", "ro-1", "--yes") == (0, "deleted 1 rollouts")
    assert await rows(own_stack, "ro-1") == (0, 0)


@pytest.mark.full
async def test_with_a_server_the_command_deletes_by_itself(own_stack: Stack, tmp_path: Path) -> None:
    with ClickHouseServer(tmp_path / "server") as server:
        own_stack.settings = own_stack.settings.model_copy(update={"clickhouse_url": server.url()})
        await start(own_stack)
        await one_rollout(own_stack, "ro-1")
        assert await rows(own_stack, "ro-1") == (2, 1)
        assert await agl(own_stack, "rollouts", "delete", "--status", "failed", "--yes") == (0, "deleted 1 rollouts")
        assert await rows(own_stack, "ro-1") == (0, 0)


async def test_deleting_requires_the_token_and_ids(own_stack: Stack) -> None:
    own_stack.settings = own_stack.settings.model_copy(update={"token": type(own_stack.settings.token)("secret")})
    await start(own_stack)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{own_stack.http}/delete", json={"rollouts": []}) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer secret"}
        for body in ({}, [], {"rollouts": "ro-1"}, {"rollouts": [1]}):
            async with session.post(f"{own_stack.http}/delete", json=body, headers=headers) as answer:
                assert answer.status == 400
                assert "POST /delete takes" in await answer.text()
        async with session.post(f"{own_stack.http}/delete", json={"rollouts": ["ro-none"]}, headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, {"removed": {}})
