"""Requests of very many nearly empty parts are refused before they are parsed; real ones, small and large, are not."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from agl_otel.collector import crowded, merged
from agl_otel.collector.crowded import FEW_PARTS, MAX_MESSAGES, MAX_OTHERS, MAX_PARTS, MAX_VALUES, check, check_json, check_parts
from agl_otel.collector.journal import Signal
from agl_otel.collector.otlpjson import to_protobuf
from agl_otel.collector.unreadable import remove_unreadable
from agl_otel.errors import DataError

from .otlp_fields import Repeated, enclosed, repeated_fields

MIB = 1 << 20
KINDS = [field.name for field in Metric.DESCRIPTOR.oneofs_by_name["data"].fields]
SAME_IN_MEMORY = {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64}
"""Values that take as many bytes in memory as on the wire."""


def request(*spans: Span) -> bytes:
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]).SerializeToString()


def points(kind: str, count: int) -> bytes:
    request = ExportMetricsServiceRequest()
    into = getattr(request.resource_metrics.add().scope_metrics.add().metrics.add(name="m"), kind).data_points
    for _ in range(count):
        into.add(time_unix_nano=1, start_time_unix_nano=1)
    return request.SerializeToString()


@pytest.mark.full
@pytest.mark.parametrize("place", repeated_fields(), ids=lambda place: place.name)
def test_every_repeated_field_is_limited(place: Repeated) -> None:
    field = place.field
    if field.type in SAME_IN_MEMORY:
        pytest.skip("it takes no more than its bytes")
    if field.message_type is None and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        content = enclosed(field, bytes(MAX_VALUES + 1))
    else:
        content = enclosed(field, b"") * (MAX_VALUES + 1)
    with pytest.raises(DataError, match="send smaller batches"):
        check(place.signal, place.request(content))


@pytest.mark.parametrize("kind", KINDS)
def test_data_points_are_parts_as_spans_are(kind: str) -> None:
    check("metrics", points(kind, MAX_PARTS - 3))
    with pytest.raises(DataError, match=f"more than {MAX_PARTS} resources, scopes and items"):
        check("metrics", points(kind, MAX_PARTS))


BOMBS = """
import resource
from agl_otel.collector import merged
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
foreign = merged.messages("traces", b"\\x0a\\x80\\x80\\x80\\x10" + b"\\x78\\x01" * (16 << 20))
print(foreign, merged.messages("logs", b"\\n\\0" * (16 << 20)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_messages_are_counted_without_creating_objects() -> None:
    """Memory stays within a small multiple of the bytes: 16 million objects would take a gigabyte."""
    answer = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, check=True).stdout.split()
    assert answer[:2] == ["1", str(16 * MIB)]
    assert int(answer[2]) < 256 << 10  # KiB


@given(st.lists(st.integers(0, 200), max_size=40), st.integers(0, 2000))
def test_short_messages_are_counted_nearly_exactly(events: list[int], values: int) -> None:
    spans = [Span(events=[Span.Event(time_unix_nano=1)] * count) for count in events]
    listed = KeyValue(key="k", value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)] * values)))
    raw = request(*spans, Span(attributes=[listed]))
    outside = 2 + len(events) + sum(events) + 4  # resource and scope, the spans, the last one with its attribute, its value and its list
    found = merged.messages("traces", raw, lists=False), merged.messages("traces", raw)
    longer = sum(span.ByteSize() > 127 for span in spans) // 2 + 3  # a length of two bytes
    assert outside - merged.UNSURE < found[0] <= outside + longer
    assert outside + values - merged.UNSURE < found[1] <= outside + values + longer


def test_unknown_fields_are_read_by_compiled_code_and_not_one_by_one_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    real = crowded.read_varint

    def counted(data: bytes, at: int) -> tuple[int, int]:
        nonlocal steps
        steps += 1
        return real(data, at)

    monkeypatch.setattr(crowded, "read_varint", counted)
    foreign = b"\x78\x01" * (4 * MIB)
    check("traces", foreign)
    assert steps == 0
    with pytest.raises(DataError, match=f"more than {MAX_OTHERS} fields beside its items"):
        check_parts("traces", foreign)
    assert steps < 3 * MAX_OTHERS


@pytest.mark.parametrize(
    "raw",
    [
        b"\n\0" * MIB,
        request(*[Span()] * MIB),
        request(*[Span()] * (FEW_PARTS * 10)),
        request(*[Span(trace_id=b"t" * 16, span_id=b"s" * 8)] * (MAX_PARTS + 1)),
    ],
    ids=["resources", "spans", "fewer spans", "too many whole ones"],
)
def test_a_crowded_request_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError, match="send smaller batches"):
        check("traces", raw)


def test_a_truncated_crowded_request_is_refused_before_it_is_split() -> None:
    raw = b"\n\xff\xff\xff\x7f" + ResourceSpans(scope_spans=[ScopeSpans()] * MIB).SerializeToString()
    with pytest.raises(DecodeError):
        check("traces", raw)
    with pytest.raises(DataError, match="send smaller batches"):
        remove_unreadable("traces", raw)


def test_the_refusal_counts_the_parts() -> None:
    rule = "a request with more than 1024 needs 16 bytes for each"
    with pytest.raises(DataError, match=rf"^it has 10242 resources, scopes and items in 20488 bytes; {rule}: send smaller batches$"):
        check("traces", request(*[Span()] * (FEW_PARTS * 10)))


@pytest.mark.full
def test_real_requests_pass() -> None:
    span = Span(trace_id=b"t" * 16, span_id=b"s" * 8)
    tokens = [AnyValue(int_value=1)] * (2 * MIB)  # a list of token ids of the greatest allowed length
    lists = [KeyValue(key=f"k{n}", value=AnyValue(array_value=ArrayValue(values=tokens))) for n in range(3)]
    nothing = KeyValue(key="k", value=AnyValue(array_value=ArrayValue(values=[AnyValue()] * 100_000)))
    short = [KeyValue(key="a", value=AnyValue(int_value=1))] * 1000
    for spans in (
        [],
        [Span()] * FEW_PARTS,
        [span] * (MAX_PARTS - 2),
        [Span(attributes=lists)],
        [Span(attributes=[nothing])],
        [Span(trace_id=b"t" * 16, span_id=b"s" * 8, attributes=short)] * 512,
    ):
        check("traces", request(*spans))
    check("traces", b"")


def test_many_attributes_are_refused_however_many_bytes_they_take() -> None:
    short = [KeyValue(key="a", value=AnyValue(int_value=1))] * (MAX_MESSAGES // 2 + 1)
    with pytest.raises(DataError, match=f"more than {MAX_MESSAGES} attributes, events, points and the like"):
        check("traces", request(Span(attributes=short)))


def test_a_request_of_far_too_many_attributes_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request above both limits is refused before values in lists are counted separately, which would double the time."""
    counted: list[bool] = []
    real = merged.messages

    def messages(signal: Signal, raw: bytes, *, lists: bool = True) -> int:
        counted.append(lists)
        return real(signal, raw, lists=lists)

    monkeypatch.setattr(merged, "messages", messages)
    short = KeyValue(key="a", value=AnyValue(int_value=1)).SerializeToString()
    place = next(each for each in repeated_fields() if each.name == "traces: resource_spans.scope_spans.spans.attributes")
    raw = place.request(enclosed(place.field, short) * ((MAX_MESSAGES + MAX_VALUES) // 2 + 1))
    with pytest.raises(DataError, match=r"^it has 104857\d\d attributes, events, points, values and the like"):
        check("traces", raw)
    assert counted == [True]


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_request_are_left_to_the_parser(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        check("traces", raw + bytes(FEW_PARTS * 16))


def test_json_of_empty_objects_is_refused_and_dense_real_json_is_not() -> None:
    with pytest.raises(DataError, match="send smaller batches"):
        to_protobuf(ExportTraceServiceRequest, b'{"resourceSpans":[' + b"{}," * MIB + b"{}]}")
    numbers = [{"intValue": "1"}] * 100_000
    check_json(json.dumps({"values": numbers}, separators=(",", ":")).encode())
