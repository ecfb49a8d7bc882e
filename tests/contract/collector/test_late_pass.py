"""The late pass and adoption on a real chdb and a real queue: against the golden vectors, and when a pass dies half-way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.collector import adopt, faults, late_pass
from agl_otel.collector.maintenance import Maintenance
from agl_otel.errors import InUseError, UnavailableError
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.cluster import on_cluster, stored_as
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import create_schema
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from tests.clickhouse_cluster import EachShard
from tests.clickhouse_server import ClickHouseServer
from tests.local_queue import LocalQueue, ManualClock

VECTORS = Path(__file__).parents[3] / "collector" / "conformance" / "late"
TRACE = f"{1:032x}"
ADOPTED = f"{late_pass.ADOPTED}{TRACE}"
Row = dict[str, Any]


def vectors() -> list[Any]:
    found = [vector for file in sorted(VECTORS.glob("*.json")) for vector in json.loads(file.read_text())["vectors"]]
    return [pytest.param(vector, id=vector["name"]) for vector in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    with ClickHouseServer(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(
    scope="module", params=["chdb", pytest.param("server", marks=pytest.mark.full), pytest.param("cluster", marks=pytest.mark.full)]
)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    if request.param == "cluster":
        engine: TraceStore = EachShard(request.getfixturevalue("shards"))
    elif request.param == "chdb":
        engine = ChdbEngine(tmp_path_factory.mktemp("late") / "traces")
        create_schema(engine, where="the test")
    else:
        server: ClickHouseServer = request.getfixturevalue("server")
        engine = ServerEngine(ServerAddress.parse(server.url()))
        create_schema(engine, where="the test")
    yield engine
    engine.close()


@pytest.fixture
def engine(opened: TraceStore) -> TraceStore:
    for table in ("otel_traces", "otel_logs", "rollout_summary_states"):
        empty(opened, table)
    return opened


def empty(engine: TraceStore, table: str) -> None:
    engine.command(f"TRUNCATE TABLE otel.{stored_as(table, engine.cluster)}{on_cluster(engine.cluster)}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[LocalQueue]:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}") as running:
        yield running


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.hooks.clear()


class LateStore:
    """A store with its own maintenance, as the tests use them."""

    def __init__(self, engine: TraceStore, queue: LocalQueue, clock: ManualClock, *, adopt: bool) -> None:
        self.engine = engine
        self.clock = clock
        self.maintenance = Maintenance(engine, queue.client, adopt_after=60.0 if adopt else None, clock=clock)
        self.since = 0.0
        self.batch = 0

    async def run(self) -> dict[str, float]:
        report = await self.maintenance.run(self.since)
        self.since = report["began"]
        return report

    async def store(self, documents: list[Row]) -> None:
        """Number the spans that have ids, like the collector, and insert the rows."""
        self.batch += 1
        rows = [self._row(document, place) for place, document in enumerate(documents)]
        if rows:
            self.engine.insert("otel.otel_traces", [*rows[0]], ["\n".join(json.dumps(row) for row in rows).encode()])

    def _row(self, document: Row, place: int) -> Row:
        received = self.clock.now - document.get("age", 0) + document.get("received", 0) / 1000
        return {
            "Timestamp": f"{received:.9f}",
            "TraceId": document["traceId"],
            "SpanId": document["spanId"],
            "ParentSpanId": document["parentSpanId"],
            "SpanName": document["name"],
            "SpanAttributes": document.get("attributes", {}),
            "ResourceAttributes": document.get("resource", {}),
            "AttrTypes": document.get("types", {}),
            "RolloutId": document.get("rollout", ""),
            "AttemptId": document.get("attempt", ""),
            "SequenceId": 0,
            "ReceivedAt": f"{received:.3f}",
            "BatchId": self.batch,
            "BatchPos": place,
            **document.get("columns", {}),
        }

    def copies(self) -> list[Row]:
        """Return the spans stored with ids beside a row without ids, a row for each copy."""
        found = self.engine.select(
            "SELECT TraceId, SpanId, RolloutId, AttemptId, SequenceId FROM otel.otel_traces WHERE RolloutId != '' "
            "AND (TraceId, SpanId) IN (SELECT TraceId, SpanId FROM otel.otel_traces WHERE RolloutId = '') ORDER BY TraceId, SpanId"
        )
        names = ("traceId", "spanId", "rollout", "attempt", "sequence")
        return [{**dict(zip(names, row, strict=True)), "sequence": int(str(row[4]))} for row in found]


def span(number: int, parent: int = 0, rollout: str = "", attempt: str = "", name: str = "work", **more: Any) -> Row:
    ids = {"traceId": TRACE, "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}" if parent else ""}
    return {**ids, "name": name, "rollout": rollout, "attempt": attempt, **more}


@pytest.fixture
async def late_store(engine: TraceStore, queue: LocalQueue, clock: ManualClock) -> AsyncIterator[LateStore]:
    made = LateStore(engine, queue, clock, adopt=True)
    yield made
    await made.maintenance.close()


@pytest.mark.parametrize(
    "opened", ["chdb", pytest.param("server", marks=pytest.mark.full)], indirect=True
)  # the other tests run every statement on a cluster, too
@pytest.mark.parametrize("vector", vectors())
async def test_golden_vectors(vector: Row, engine: TraceStore, queue: LocalQueue, clock: ManualClock) -> None:
    late_store = LateStore(engine, queue, clock, adopt=vector.get("policy") == "adopt")
    known: list[Row] = []
    for step in vector["steps"]:
        clock.advance(step.get("later", 0))
        stored = [document for document in step["stored"] if document.get("rollout")]
        await late_store.store(step["stored"])
        before = {(row["traceId"], row["spanId"]) for row in known + stored}
        await late_store.run()
        new = [row for row in late_store.copies() if (row["traceId"], row["spanId"]) not in before]
        assert [shown(row, expected) for row, expected in zip(new, step["copies"], strict=True)] == step["copies"]
        known += new
    await late_store.maintenance.close()


def shown(row: Row, expected: Row) -> Row:
    """Return `row` in the form of the vector, without the fields that it leaves open."""
    return {**{name: row[name] for name in expected}, **{name: "*" for name, value in expected.items() if value == "*"}}


@pytest.mark.parametrize("point", faults.LATE_POINTS)
async def test_a_pass_that_dies_is_finished_by_the_next(point: str, late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store([span(2, 1, age=90), span(3, 2, age=90)])
    other = [{**span(n, n - 1, age=90), "traceId": f"{2:032x}"} for n in (5, 6)]
    await late_store.store([*other, {**span(4, 0, "ro-1", "at-1", age=90), "traceId": f"{2:032x}"}])

    def die() -> None:
        raise ProcessLookupError

    faults.hooks[point] = die
    with pytest.raises(ProcessLookupError):
        await late_store.run()
    faults.hooks.clear()
    await late_store.run()
    assert [(row["spanId"][-1], row["rollout"]) for row in late_store.copies()] == [
        ("2", ADOPTED),
        ("3", ADOPTED),
        ("5", "ro-1"),
        ("6", "ro-1"),
    ]
    (rollout,) = (await queue.client.query_rollouts(mode_in=["production"])).items
    assert isinstance(rollout, AttemptedRollout)
    assert (rollout.rollout_id, rollout.status, rollout.attempt.status) == (ADOPTED, "succeeded", "succeeded")
    assert {row["attempt"] for row in late_store.copies()[:2]} == {rollout.attempt.attempt_id}
    assert await late_store.run() == {"spans": 0, "logs": 0, "ambiguous": 0, "adopted": 0, "began": late_store.clock.now}


async def test_an_adopted_rollout_records_its_origin(late_store: LateStore, queue: LocalQueue) -> None:
    messages = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    await late_store.store(
        [span(2, 1, age=70), span(1, 0, name="POST /chat", age=80, attributes={"gen_ai.input.messages": json.dumps(messages)})]
    )
    assert (await late_store.run())["adopted"] == 1
    ((rollout),) = (await queue.client.query_rollouts()).items
    assert (rollout.rollout_id, rollout.mode, rollout.status, rollout.input) == (ADOPTED, "production", "succeeded", messages)
    assert rollout.metadata is not None
    assert (rollout.metadata["trace_id"], rollout.metadata["name"]) == (TRACE, "POST /chat")
    assert rollout.metadata["last_time"] - rollout.metadata["first_time"] == pytest.approx(10)


def turn(trace: int, conversation: str, age: float, **more: Any) -> list[Row]:
    root, call = span(1, 0, age=age, **more), span(2, 1, age=age - 1, attributes={conventions.CONVERSATION_ID: conversation})
    return [{**each, "traceId": f"{trace:032x}"} for each in (root, call)]


async def test_traces_of_one_conversation_become_one_rollout(late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store(
        [*turn(3, "c 1", 80), *turn(2, "c 1", 90, attributes={"input.value": "first"}), *turn(4, "c 2", 90), *turn(5, "", 90)]
    )
    assert (await late_store.run())["adopted"] == 3
    rollouts = {rollout.rollout_id: rollout for rollout in (await queue.client.query_rollouts()).items}
    joined = {row["traceId"][-1]: row["rollout"] for row in late_store.copies()}
    assert joined["2"] == joined["3"] != joined["4"] and joined["5"] == f"{late_pass.ADOPTED}{5:032x}"
    one = rollouts[joined["2"]]
    assert (one.input, one.status, one.metadata and one.metadata["conversation_id"]) == ("first", "succeeded", "c 1")
    await late_store.store(turn(6, "c 1", 0))
    late_store.clock.advance(70)
    assert await late_store.run() == {"spans": 2, "logs": 0, "ambiguous": 0, "adopted": 0, "began": late_store.clock.now}, (
        "a turn after the rollout's end"
    )
    await late_store.store([{**span(9, 2), "traceId": f"{6:032x}"}])
    assert (await late_store.run())["spans"] == 1
    copies = [row for row in late_store.copies() if row["rollout"] == one.rollout_id]
    assert [row["traceId"][-1] for row in copies] == ["2", "2", "3", "3", "6", "6", "6"]
    assert sorted(row["sequence"] for row in copies) == list(range(1, 8)) and len({row["attempt"] for row in copies}) == 1
    assert len((await queue.client.query_rollouts()).items) == 3


FAILED = {"StatusCode": "Error", "StatusMessage": "no model"}
FINE = {"StatusCode": "Unset", "StatusMessage": ""}


@pytest.mark.parametrize(("first", "last"), [(9999, 1), (1, 9999)])
async def test_a_conversation_on_several_pages_is_one_whole(
    first: int, last: int, late_store: LateStore, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt, "TRACES", 3)
    others = [row for n in range(100, 108) if n != 104 for row in turn(n, "", 85, columns=FINE)]
    opening = turn(first, "c", 90, attributes={"input.value": "first question"}, columns=FINE)
    closing = turn(last, "c", 80, attributes={"input.value": "second question"}, columns=FAILED)
    await late_store.store([{"columns": FINE, **row} for row in (*opening, *others, *turn(104, "c", 86, columns=FINE), *closing)])
    await late_store.store([{"columns": FINE, **row} for row in turn(50, "c", 10, columns=FINE)])
    assert (await late_store.run())["adopted"] == 8
    (rollout,) = (await queue.client.query_rollouts(rollout_id_contains=late_pass.CONVERSATION)).items
    assert isinstance(rollout, AttemptedRollout) and rollout.metadata is not None
    assert (rollout.input, rollout.status, rollout.attempt.error) == ("first question", "failed", "no model")
    assert rollout.metadata["trace_ids"] == [f"{n:032x}" for n in (first, 104, last)], "one goes on: it joins when it is quiet"
    assert {row["traceId"] for row in late_store.copies() if row["rollout"] == rollout.rollout_id} == {*rollout.metadata["trace_ids"]}


async def test_a_conversation_that_a_trace_only_mentions_is_not_started_in_part(
    late_store: LateStore, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt, "TRACES", 1)
    other = {**span(3, 1, age=80, attributes={conventions.CONVERSATION_ID: "b"}), "traceId": f"{1:032x}"}
    await late_store.store([*turn(1, "a", 90), other, *turn(3, "b", 70, attributes={"input.value": "last"})])
    await late_store.store(turn(2, "b", 75, attributes={"input.value": "first"}))
    assert (await late_store.run())["adopted"] == 2
    found = {(item.metadata or {})["conversation_id"]: item for item in (await queue.client.query_rollouts()).items}
    assert {key: (item.input, len((item.metadata or {})["trace_ids"])) for key, item in found.items()} == {
        "a": (None, 1),
        "b": ("first", 2),
    }


async def test_a_conversations_pass_that_dies_is_finished_by_the_next(late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store([*turn(2, "c", 90), *turn(3, "c", 80)])

    def die() -> None:
        raise ProcessLookupError

    faults.hooks["adopt-started"] = die
    with pytest.raises(ProcessLookupError):
        await late_store.run()
    faults.hooks.clear()
    late_store.since = late_store.clock.now
    await late_store.run()
    (rollout,) = (await queue.client.query_rollouts()).items
    assert rollout.status == "succeeded" and {row["rollout"] for row in late_store.copies()} == {rollout.rollout_id}
    assert len(late_store.copies()) == 4


async def test_steps_of_training_runs_are_not_adopted(late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store([span(1, 0, age=80, name="agentlightning.train.step"), span(2, 1, age=80, name="agentlightning.train.evidence")])
    await late_store.store([{**span(3, 0, age=80, name="agentlightning.train.run"), "traceId": f"{2:032x}"}])
    assert (await late_store.run())["adopted"] == 0
    assert not (await queue.client.query_rollouts()).items


async def test_spans_of_training_runs_get_no_ids_whoever_opens_their_trace(late_store: LateStore) -> None:
    await late_store.store([span(1, 0, "ro-1", "at-1", conventions.SPAN_ATTEMPT), span(4, 1)])
    await late_store.store([span(2, 1, name="agentlightning.train.step"), span(3, 1, name="agentlightning.train.stage gate")])
    assert (await late_store.run())["spans"] == 1
    assert [row["spanId"] for row in late_store.copies()] == [f"{4:016x}"]
    assert (await late_store.run())["spans"] == 0


async def test_a_trace_whose_root_failed_becomes_a_failed_rollout(late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store([span(1, 0, age=70, columns={"StatusCode": "Error", "StatusMessage": "no model"})])
    await late_store.run()
    ((rollout),) = (await queue.client.query_rollouts()).items
    assert isinstance(rollout, AttemptedRollout)
    assert (rollout.status, rollout.attempt.error) == ("failed", "no model")


async def test_late_spans_do_not_change_a_finished_rollout(late_store: LateStore, queue: LocalQueue) -> None:
    await late_store.store([span(1, 0, age=70)])
    await late_store.run()
    (before,) = (await queue.client.query_rollouts()).items
    await late_store.store([span(2, 1)])
    assert (await late_store.run())["spans"] == 1
    assert (await queue.client.query_rollouts()).items == [before]


async def test_log_records_follow_their_trace_or_their_span_once(late_store: LateStore) -> None:
    await late_store.store([span(1, 0, "ro-1", "at-1", conventions.SPAN_ATTEMPT)])
    other = f"{2:032x}"
    await late_store.store([{**span(7, 0, "ro-2", "at-2"), "traceId": other}, {**span(8, 7), "traceId": other}])
    stamp = f"{late_store.clock.now:.3f}"
    logs = [(TRACE, ""), (TRACE, f"{9:016x}"), (other, f"{8:016x}"), (other, f"{9:016x}"), (other, ""), (f"{3:032x}", ""), ("", "")]
    rows = [
        {"Timestamp": stamp, "TraceId": trace, "SpanId": own, "Body": f"{n}", "ReceivedAt": stamp, "BatchId": 1, "BatchPos": n}
        for n, (trace, own) in enumerate(logs)
    ]
    late_store.engine.insert("otel.otel_logs", [*rows[0]], ["\n".join(map(json.dumps, rows)).encode()])
    assert (await late_store.run())["logs"] == 3
    query = "SELECT Body, RolloutId, AttemptId FROM otel.otel_logs WHERE RolloutId != '' ORDER BY Body"
    assert late_store.engine.select(query) == [["0", "ro-1", "at-1"], ["1", "ro-1", "at-1"], ["2", "ro-2", "at-2"]]
    assert (await late_store.run())["logs"] == 0


def answered(number: int, response: str, rollout: str = "", age: float = 0, **more: Any) -> Row:
    """Return a model call, the root of its own trace."""
    ids = (rollout, "at-1") if rollout else ("", "")
    return {**span(number, 0, *ids, age=age, attributes={conventions.RESPONSE_ID: response}, **more), "traceId": f"{number:032x}"}


def evaluate(late_store: LateStore, *responses: str, age: float = 20) -> None:
    """Store an evaluation of no trace for each response; the values count them."""
    stamp = f"{late_store.clock.now - age:.3f}"
    late_store.batch += 1
    rows = [
        {
            "Timestamp": stamp, "EventName": conventions.EVALUATION, "ReceivedAt": stamp, "BatchId": late_store.batch, "BatchPos": n,
            "LogAttributes": {conventions.EVALUATION_SCORE: f"{n}", **({conventions.RESPONSE_ID: response} if response else {})},
        }
        for n, response in enumerate(responses)
    ]  # fmt: skip
    late_store.engine.insert("otel.otel_logs", [*rows[0]], ["\n".join(map(json.dumps, rows)).encode()])


def evaluated(late_store: LateStore) -> list[Any]:
    return late_store.engine.select(
        "SELECT Rewards['agentlightning.reward.0.value'], RolloutId, AttemptId FROM otel.otel_logs WHERE RolloutId != '' ORDER BY ALL"
    )


@pytest.mark.parametrize("others", [(), ("ro-2",)])
async def test_a_record_of_no_span_is_of_the_only_attempt_in_its_trace(others: tuple[str, ...], late_store: LateStore) -> None:
    """As feedback on a conversation is that was not adopted yet."""
    trace = f"{7:032x}"
    spans = [span(number, 9, rollout, "at-1") for number, rollout in enumerate(("ro-1", *others), 1)]
    await late_store.store([{**each, "traceId": trace} for each in spans])
    stamp = f"{late_store.clock.now - 20:.3f}"
    values = {"EventName": conventions.EVALUATION, "LogAttributes": {conventions.EVALUATION_SCORE: "0"}}
    row = {"Timestamp": stamp, "ReceivedAt": stamp, "TraceId": trace, "BatchId": 99, "BatchPos": 1, **values}
    late_store.engine.insert("otel.otel_logs", [*row], [json.dumps(row).encode()])
    assert (await late_store.run())["logs"] == (0 if others else 1)
    assert evaluated(late_store) == ([] if others else [["0", "ro-1", "at-1"]])


async def test_evaluations_of_no_trace_follow_the_response_that_they_name_once(late_store: LateStore) -> None:
    """An evaluator that knows only the responses: OpenTelemetry has it name them."""
    await late_store.store([answered(1, "r1", "ro-1"), answered(2, "r2", "ro-2"), answered(3, "r1", "ro-1")])
    evaluate(late_store, "r1", "r2", "r1", "unknown", "")
    assert (await late_store.run())["logs"] == 3
    assert evaluated(late_store) == [["0", "ro-1", "at-1"], ["1", "ro-2", "at-1"], ["2", "ro-1", "at-1"]]
    late_store.since = 0
    assert (await late_store.run())["logs"] == 0
    await late_store.store([answered(5, "unknown", "ro-5")])
    late_store.since = 0
    assert (await late_store.run())["logs"] == 1, "a pass over everything finds the calls that came later"


async def test_a_response_of_several_attempts_is_left_counted_and_logged_once(
    late_store: LateStore, caplog: pytest.LogCaptureFixture
) -> None:
    await late_store.store([answered(1, "twice", "ro-1"), answered(2, "twice", "ro-2")])
    evaluate(late_store, "twice", "twice")
    assert [(await late_store.run())["ambiguous"] for _ in range(2)] == [1, 0], "counted by response and time"
    evaluate(late_store, "twice", age=16)
    assert (await late_store.run())["ambiguous"] == 1
    assert evaluated(late_store) == [] and late_store.maintenance.counts()["ambiguous"] == 2
    (record,) = [each for each in caplog.records if "several attempts" in each.message]
    assert "'twice'" in record.message


async def test_only_calls_around_an_evaluation_are_its_candidates(late_store: LateStore) -> None:
    """A model server that counts its responses gives the same ids after a restart."""
    await late_store.store([answered(1, "r", "ro-old", 9 * 86_400), answered(2, "r", "ro-1", 6 * 86_400), answered(3, "r", "ro-2", 100)])
    evaluate(late_store, "r", age=86_400)
    await late_store.run()
    assert evaluated(late_store) == [["0", "ro-1", "at-1"]]


async def test_an_evaluation_waits_for_the_span_of_its_call(late_store: LateStore) -> None:
    await late_store.store([answered(1, "r", "ro-old", 30 * 86_400)])
    evaluate(late_store, "r", age=0)
    await late_store.run()
    late_store.clock.advance(1)
    await late_store.store([answered(2, "r", "ro-new")])
    late_store.clock.advance(4)
    assert (await late_store.run())["logs"] == 0
    late_store.clock.advance(15)
    assert (await late_store.run())["logs"] == 1
    assert evaluated(late_store) == [["0", "ro-new", "at-1"]]
    evaluate(late_store, "r", age=-40)
    late_store.clock.advance(60)
    await late_store.run()
    await late_store.store([answered(3, "r", "ro-3")])
    late_store.since = 0
    assert (await late_store.run())["logs"] == 0 and len(evaluated(late_store)) == 2, "what has ids keeps them"


async def test_an_evaluation_that_came_long_before_its_call_is_joined_with_it(late_store: LateStore) -> None:
    """An exporter that could not send for an hour, and a judge that could."""
    evaluate(late_store, "r", "other", age=20)
    assert (await late_store.run())["logs"] == 0
    late_store.clock.advance(3600)
    await late_store.run()
    await late_store.store([answered(1, "r", "ro-1", 3600, columns={"ReceivedAt": f"{late_store.clock.now:.3f}"})])
    late_store.clock.advance(5)
    assert (await late_store.run())["logs"] == 1
    assert evaluated(late_store) == [["0", "ro-1", "at-1"]]
    late_store.clock.advance(5)
    assert (await late_store.run())["logs"] == 0, "once"


@pytest.mark.parametrize("refused", [False, True])
async def test_an_evaluation_waits_while_the_latest_call_has_no_ids(refused: bool, late_store: LateStore, queue: LocalQueue) -> None:
    latest = answered(2, "r", age=50)
    latest["attributes"] |= {conventions.INVALID: "its key"} if refused else {}
    await late_store.store([{**answered(1, "r", "ro-yesterday", 86_400)}, latest])
    evaluate(late_store, "r", age=40)
    await late_store.run()
    assert evaluated(late_store) == ([["0", "ro-yesterday", "at-1"]] if refused else [])


async def test_what_is_adopted_gets_its_earlier_evaluations(late_store: LateStore, queue: LocalQueue) -> None:
    """The trace went on long after the evaluation of its first call."""
    work = {**span(9, 1, age=90), "traceId": f"{1:032x}", "attributes": {}}
    await late_store.store([answered(1, "r", age=610), answered(2, "other", age=30), work])
    evaluate(late_store, "r", "other", age=600)
    late_store.since = late_store.clock.now - 30
    report = await late_store.run()
    assert (report["adopted"], report["logs"]) == (1, 1)
    (rollout,) = (await queue.client.query_rollouts()).items
    assert isinstance(rollout, AttemptedRollout)
    assert evaluated(late_store) == [["0", rollout.rollout_id, rollout.attempt.attempt_id]]


@pytest.mark.parametrize("refused_first", [True, False])
async def test_a_refused_span_neither_hides_one_with_the_same_ids_nor_is_copied(refused_first: bool, late_store: LateStore) -> None:
    refused, true = span(2, 1, name="forged", attributes={conventions.INVALID: "its key"}), span(2, 1, name="true")
    await late_store.store([refused, true] if refused_first else [true, refused])
    await late_store.store([span(1, 0, "ro-1", "at-1"), span(3, 2)])
    await late_store.run()
    found = late_store.engine.select("SELECT SpanName FROM otel.otel_traces WHERE RolloutId = 'ro-1' ORDER BY SpanId")
    assert found == [["work"], ["true"], ["work"]]


async def test_a_trace_larger_than_a_batch_is_copied_whole(late_store: LateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_pass, "ROWS", 4)
    monkeypatch.setattr(late_pass, "TRACES", 2)
    await late_store.store([span(n, n - 1) for n in range(20, 1, -1)] + [span(90, 89), span(1, 0, "ro-1", "at-1")])
    for trace in range(2, 7):
        await late_store.store(
            [{**span(1, 0, f"ro-{trace}", "at-1"), "traceId": f"{trace:032x}"}, {**span(2, 1), "traceId": f"{trace:032x}"}]
        )
    await late_store.run()
    copies = late_store.copies()
    assert len(copies) == 19 + 5
    assert sorted(row["sequence"] for row in copies if row["rollout"] == "ro-1") == list(range(1, 20))


async def test_a_pass_over_everything_repairs_the_summary(late_store: LateStore) -> None:
    await late_store.store([span(1, 0, "ro-1", "at-1"), span(2, 1)])
    await late_store.run()
    empty(late_store.engine, "rollout_summary_states")
    late_store.since = 0
    await late_store.run()
    assert late_store.engine.select("SELECT RolloutId, Spans FROM otel.rollout_summary") == [["ro-1", 1]]


async def test_passes_of_one_collector_take_turns(late_store: LateStore) -> None:
    await late_store.store([span(1, 0, "ro-1", "at-1"), span(2, 1)])
    others: list[asyncio.Future[dict[str, float]]] = []
    faults.hooks["late-numbered"] = lambda: others.append(asyncio.ensure_future(late_store.maintenance.run(0)))
    assert (await late_store.run())["spans"] == 1
    with pytest.raises(InUseError, match="running already"):
        await others[0]


async def test_a_pass_ends_when_its_collector_stops(late_store: LateStore) -> None:
    await late_store.store([span(1, 0, "ro-1", "at-1"), span(2, 1)])
    closing: list[asyncio.Future[None]] = []
    faults.hooks["late-copied"] = lambda: closing.append(asyncio.ensure_future(late_store.maintenance.close()))
    faults.hooks["adopt-started"] = lambda: pytest.fail("it went on")
    with pytest.raises(UnavailableError, match="the next one goes on"):
        await late_store.run()
    await closing[0]
