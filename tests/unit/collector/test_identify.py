"""Identification against the golden vectors, and the memory that it reads."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel.collector import identify, scan
from agl_otel.collector.core import Core
from agl_otel.collector.identify import (
    Identity,
    _inherited,  # pyright: ignore[reportPrivateUsage] - the test counts its steps
    bind,
    learn,
)
from agl_otel.collector.identities import Identities
from agl_otel.collector.memory import TraceMemory
from agl_otel.collector.metrics import hold_points, identify_points, metric_rows
from agl_otel.collector.policy import DROPPED, apply_policy
from agl_otel.net.auth import Sender, attempt_ingest_key, attempt_of, ingest_key, sender_of
from agl_otel_hook import conventions
from tests.compared import COMPARED, Number
from tests.cores import both_cores

VECTORS = Path(__file__).parents[3] / "collector" / "conformance"
REASONS = {
    "trace_id": scan.TRACE_ID,
    "span_id": scan.SPAN_ID,
    "parent_id": scan.PARENT_ID,
    "timestamp": scan.TIMESTAMP,
    "rollout_id": identify.ROLLOUT_ID,
    "attempt_id": identify.ATTEMPT_ID,
    "key": identify.KEY,
    "training": identify.TRAINING,
}
BYTES = {"traceId", "spanId", "parentSpanId"}


def vectors(folder: str = ".") -> list[Any]:
    found: list[Any] = []
    for file in sorted((VECTORS / folder).glob("*.json")):
        content = json.loads(file.read_text())
        found += [pytest.param(int(content["nowUnixNano"]), vector, id=f"{file.stem}: {vector['name']}") for vector in content["vectors"]]
    return found


def with_base64(value: Any) -> Any:
    """Convert ids: OTLP/JSON has them in hex, protobuf's own JSON mapping in base64."""
    if isinstance(value, dict):
        return {key: base64.b64encode(bytes.fromhex(item)).decode() if key in BYTES else with_base64(item) for key, item in value.items()}
    return [with_base64(item) for item in value] if isinstance(value, list) else value


def expected(entry: dict[str, Any]) -> Identity:
    if "reject" in entry:
        return Identity(reason=REASONS[entry["reject"]])
    if "drop" in entry:
        return Identity(reason=DROPPED)
    return Identity(entry["rollout"], entry["attempt"], entry.get("sequence"))


def run_step(step: dict[str, Any], memory: TraceMemory, now: int, used_core: Core) -> Identities:
    known = None if "bound" in step else memory
    records = "resourceLogs" in step["request"]
    request = json_format.ParseDict(with_base64(step["request"]), (ExportLogsServiceRequest if records else ExportTraceServiceRequest)())
    read, _ = used_core.scan(
        "logs" if records else "traces", request.SerializeToString(), latest=now + scan.AHEAD_NANO, max_attributes=1 << 20
    )
    found = bound(step, identify.identify(read, step.get("metadata", {}), known, records=records))
    if not records:
        learn(read, found, memory, now=0.0, by_key="bound" in step)
    return found


def bound(step: dict[str, Any], found: Identities) -> Identities:
    to = step.get("bound")
    return bind(found, (to["rollout"], to["attempt"]), Counter()) if to else found


@pytest.mark.parametrize(("now", "vector"), vectors())
@both_cores
def test_golden_vector(now: int, vector: dict[str, Any], used_core: Core) -> None:
    memory = TraceMemory()
    for step in vector["steps"]:
        assert list(run_step(step, memory, now, used_core)) == [expected(entry) for entry in step["expect"]]


@pytest.mark.parametrize(("now", "vector"), vectors("keys"))
@both_cores
def test_golden_vector_of_a_key(now: int, vector: dict[str, Any], used_core: Core) -> None:
    memory = TraceMemory()
    for step in vector["steps"]:
        assert list(run_step(step, memory, now, used_core)) == [expected(entry) for entry in step["expect"]]


@pytest.mark.parametrize(("now", "vector"), vectors("metrics"))
def test_golden_vector_of_metrics(now: int, vector: dict[str, Any]) -> None:
    to = vector.get("bound")
    sender = Sender(is_agent=vector.get("agent", False), bound=(to["rollout"], to["attempt"]) if to else None)
    request = json_format.ParseDict(vector["request"], ExportMetricsServiceRequest())
    raw = request.SerializeToString()
    found = identify_points(request, now_unix_nano=now)
    if sender.is_agent:
        found, raw = hold_points(request, raw, found, sender)
    rows = metric_rows(raw, found, received_ms=0, batch=1, first={})
    stored = iter([row for kind in rows.values() for row in kind])
    identities = [Identity(reason=each.reason) if each.reason else ids_of(json.loads(next(stored))) for each in found]
    assert identities == [expected(entry) for entry in vector["expect"]]
    assert next(stored, None) is None


def ids_of(row: dict[str, Any]) -> Identity:
    """Return the ids that the tables derive (traces/sql/schema.sql)."""
    resource = row["ResourceAttributes"]
    return Identity(resource.get(conventions.ROLLOUT_ID, ""), resource.get(conventions.ATTEMPT_ID, ""))


def test_keys_of_attempts_are_those_of_the_golden_vectors() -> None:
    keys = json.loads((VECTORS / "keys" / "keys.json").read_text())
    for each in keys["keys"]:
        assert attempt_ingest_key(each["token"], each["rollout"], each["attempt"]) == each["key"]
        assert attempt_of(each["token"], each["key"]) == (each["rollout"], each["attempt"])
    for each in keys["refused"]:
        assert attempt_of(each["token"], each["key"]) is None, each["name"]
        is_agent = each["key"] == ingest_key(each["token"])
        assert sender_of(each["token"], each["key"]) == Sender(is_agent=is_agent), each["name"]
    assert attempt_ingest_key("", "ro-1", "at-1") == "" and attempt_of("", keys["keys"][0]["key"]) is None


@pytest.mark.parametrize(("now", "vector"), vectors("policies"))
@both_cores
def test_golden_vector_of_a_policy(now: int, vector: dict[str, Any], used_core: Core) -> None:
    memory = TraceMemory()
    for step in vector["steps"]:
        found = apply_policy(run_step(step, memory, now, used_core), vector["policy"])
        assert [i._replace(sequence=None) if i.reason else i for i in found] == [expected(entry) for entry in step["expect"]]


@pytest.mark.parametrize("circle", [False, True])
def test_a_chain_of_parents_is_walked_in_linear_time(circle: bool) -> None:
    count = 3000
    ids = [number.to_bytes(8) for number in range(count)]
    parents = [*ids[1:], ids[0] if circle else b"unknown!"]
    spans = scan.Scan([b"t" * 16] * count, ids, parents, [count], [b""], [(count, b"")])
    places = {(b"t" * 16, span_id): Number(number) for number, span_id in enumerate(ids)}
    resolved: dict[int, tuple[str, str]] = {}
    COMPARED.clear()
    _inherited(Number(0), spans, [None] * count, places, {}, TraceMemory(), resolved)
    assert resolved == dict.fromkeys(range(count), ("", ""))
    assert COMPARED.total() < 20 * count


def test_memory_forgets_the_oldest_trace_first() -> None:
    memory = TraceMemory(max_traces=2)
    for number in range(3):
        memory.learn(bytes([number]) * 16, [b"s"], (f"ro-{number}", "at"), opens=[b"s"], now=float(number))
    assert memory.opened_by(bytes([0]) * 16) is None
    assert memory.opened_by(bytes([2]) * 16) == ("ro-2", "at")
    assert len(memory) == 2


def test_memory_forgets_what_is_old() -> None:
    memory = TraceMemory(max_age_seconds=10)
    memory.learn(b"a" * 16, [b"s"], ("ro-1", "at"), opens=[b"s"], now=0.0)
    memory.learn(b"b" * 16, [b"s"], ("ro-2", "at"), opens=[b"s"], now=10.5)
    assert memory.opened_by(b"a" * 16) is None


def test_memory_keeps_a_trace_in_use() -> None:
    memory = TraceMemory(max_age_seconds=10)
    memory.learn(b"a" * 16, [b"1"], ("ro-1", "at"), opens=[b"1"], now=0.0)
    memory.learn(b"a" * 16, [b"2"], ("ro-1", "at"), now=9.0)
    memory.learn(b"b" * 16, [b"3"], ("ro-2", "at"), opens=[b"3"], now=15.0)
    assert memory.opened_by(b"a" * 16) == ("ro-1", "at")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=200))
def test_memory_stays_within_its_bounds(spans: list[tuple[int, int, int, bool]]) -> None:
    memory = TraceMemory(max_traces=3, max_spans=8)
    for at, (trace, span, rollout, opens) in enumerate(spans):
        spans_heard = [bytes([span]) * 8]
        memory.learn(bytes([trace]) * 16, spans_heard, (f"ro-{rollout}", "at"), opens=spans_heard if opens else (), now=float(at))
        assert len(memory) <= 3
        held = sum(memory.span(bytes([t]) * 16, bytes([s]) * 8) is not None for t in range(6) for s in range(10))
        assert memory.spans_held == held <= 10


def test_a_request_of_many_runs_with_defects_is_searched_by_halves() -> None:
    count = 3000
    ids = [scan.id_attributes([KeyValue(key=conventions.ROLLOUT_ID, value=AnyValue(string_value=f"ro-{n}"))]) for n in range(count)]
    defects = [(Number(n), "why") for n in range(count)]
    read = scan.Scan([b"t" * 16] * count, [b"s" * 8] * count, [b""] * count, [count], [b""], [(1, own) for own in ids], defects)
    COMPARED.clear()
    found = identify.identify(read, {}, None)
    assert {identity.reason for identity in found} == {"why"}
    assert COMPARED.total() < 60 * count
