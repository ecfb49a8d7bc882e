"""The compiled core reads every request and builds every row as its specification in Python does, value for value."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from agl_otel.collector.core import Core, PythonCore, core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Request
from agl_otel.errors import SettingsError
from tests.cores import COMPILED, compare, needs_compiled_core, rows
from tests.native_block import read_block
from tests.otlp_requests import NOW, log_requests, mutate, trace_requests

pytestmark = needs_compiled_core
VECTORS = Path(__file__).parents[3] / "collector" / "conformance" / "values" / "values.json"
WHOLE = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example], deadline=None)


@WHOLE
@given(trace_requests(), st.frozensets(st.integers(0, 5), max_size=2))
def test_spans(request: ExportTraceServiceRequest, refused: frozenset[int]) -> None:
    compare("traces", request.SerializeToString(), refused)


@WHOLE
@given(log_requests(), st.frozensets(st.integers(0, 5), max_size=2))
def test_log_records(request: Any, refused: frozenset[int]) -> None:
    compare("logs", request.SerializeToString(), refused)


@WHOLE
@given(trace_requests() | log_requests(), st.randoms(use_true_random=False))
def test_damaged_requests_and_those_of_other_encoders(request: Any, random: Random) -> None:
    for _ in range(10):
        compare("traces" if isinstance(request, ExportTraceServiceRequest) else "logs", mutate(request.SerializeToString(), random))


def expanded(used: Core, request: Any) -> int:
    kind = "traces" if isinstance(request, ExportTraceServiceRequest) else "logs"
    return used.scan(kind, request.SerializeToString(), latest=NOW, max_attributes=3)[1]


@WHOLE
@given(trace_requests() | log_requests())
def test_a_request_has_one_size_of_its_rows(request: Any) -> None:
    """Else one core would refuse with AGL_MAX_EXPANDED_BYTES what the other takes."""
    assert expanded(COMPILED, request) == expanded(PythonCore(), request)


@pytest.mark.parametrize("scope", [InstrumentationScope(name="é" * 4000), InstrumentationScope(attributes=[KeyValue(key="k" * 9000)])])
def test_spans_repeat_the_name_of_their_scope_and_not_its_attributes(scope: InstrumentationScope) -> None:
    request = one_span()
    part = request.resource_spans[0].scope_spans[0]
    part.scope.CopyFrom(scope)
    part.spans.extend([part.spans[0]] * 50)
    assert expanded(COMPILED, request) == expanded(PythonCore(), request)


def one_span(**values: Any) -> ExportTraceServiceRequest:
    span = Span(trace_id=bytes(15) + b"1", span_id=bytes(7) + b"1", start_time_unix_nano=NOW, end_time_unix_nano=NOW, **values)
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])


def list_of(texts: list[str]) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in texts]))


def test_every_character_of_a_list_is_escaped_alike() -> None:
    texts = [chr(code) for code in (*range(0x250), *range(0x2000, 0x2070), 0xFEFF, 0xFFFD, 0xFFFF, 0x10FFFF)]
    compare("traces", one_span(attributes=[KeyValue(key="k", value=list_of(texts))]).SerializeToString())


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text())["vectors"], ids=lambda vector: vector["name"])
def test_the_golden_vectors(vector: dict[str, Any]) -> None:
    value = json_format.ParseDict(vector["value"], AnyValue())
    raw = one_span(attributes=[KeyValue(key="k", value=value)]).SerializeToString()
    (row,), _ = rows(COMPILED, "traces", raw, [Identity("ro", "at")])
    types = dict(dict(row)["AttrTypes"])
    assert (dict(dict(row)["SpanAttributes"])["k"], types.get("k", "")) == (vector["text"], vector["type"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_double_has_the_same_text(number: float) -> None:
    compare("traces", one_span(attributes=[KeyValue(key="k", value=AnyValue(double_value=number))]).SerializeToString())


@pytest.mark.parametrize("depth", [90, 93, 94, 95, 96, 97, 98, 100, 101, 200, 5000])
@pytest.mark.parametrize("kind", ["array", "kvlist", "group"])
def test_values_are_nested_equally_deep(depth: int, kind: str) -> None:
    value = b"\x0a\x01x"
    for _ in range(depth):
        if kind == "group":
            value = b"\x0b" + value + b"\x0c"
        elif kind == "array":
            value = enclosed(b"\x2a", enclosed(b"\x0a", value))
        else:
            value = enclosed(b"\x32", enclosed(b"\x0a", enclosed(b"\x12", value)))
    span = enclosed(b"\x4a", b"\x0a\x01k" + enclosed(b"\x12", value))
    compare("traces", enclosed(b"\x0a", enclosed(b"\x12", enclosed(b"\x12", span))))


def enclosed(tag: bytes, content: bytes) -> bytes:
    size, length = b"", len(content)
    while length >= 0x80:
        size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
    return tag + size + bytes([length]) + content


def test_a_request_that_cannot_be_read_adds_nothing() -> None:
    made = COMPILED.rows("traces")
    good = Request("traces", 1, Identities.of([Identity("ro", "at")]), one_span(name="a").SerializeToString())
    two = one_span(name="b")
    two.resource_spans[0].scope_spans[0].spans.append(two.resource_spans[0].scope_spans[0].spans[0])
    made.add(good, [1], batch=1, first=0, only=None)
    for raw, identities in (
        (two.SerializeToString()[:-3], Identities([(2, Identity("ro", "at"))])),
        (two.SerializeToString(), good.identities),
        (good.raw, Identities()),
    ):
        with pytest.raises(ValueError, match=r"cut off|more or fewer"):
            made.add(Request("traces", 1, identities, raw), [1] * len(identities), batch=1, first=1, only=None)
    made.add(good, [2], batch=1, first=1, only=None)
    assert [(row["SpanName"], row["SequenceId"]) for row in read_block(b"".join(made.take()))] == [("a", 1), ("a", 2)]


def test_large_blocks_are_handed_over_in_pieces() -> None:
    made = COMPILED.rows("traces")
    raw = one_span(name="n" * 300_000, attributes=[KeyValue(key="k", value=AnyValue(string_value="v" * 700_000))]).SerializeToString()
    for first in range(5):
        made.add(Request("traces", 1, Identities.of([Identity("ro", "at")]), raw), [1], batch=1, first=first, only=None)
    pieces = list(made.take())
    assert len(pieces) > 4
    assert max(map(len, pieces)) <= 1 << 20
    assert [len(row["SpanName"]) for row in read_block(b"".join(pieces))] == [300_000] * 5


def test_a_core_that_must_be_compiled_is_missed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert core("compiled").name == "compiled"
    assert core("python").name == "python"
    monkeypatch.setattr("agl_otel.collector.core._native", None)
    assert core().name == "python"
    with pytest.raises(SettingsError, match="make core"):
        core("compiled")
