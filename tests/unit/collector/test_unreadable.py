"""A span that protobuf's parser rejects is removed alone; the rest of the request is kept, byte for byte."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from agl_otel.collector.crowded import MAX_MESSAGES
from agl_otel.collector.unreadable import remove_unreadable
from agl_otel.errors import DataError
from agl_otel_hook.varint import varint

BAD = "B" * 8
"""Replaced by text that is not UTF-8."""


def nested(depth: int) -> AnyValue:
    value = AnyValue(int_value=1)
    for _ in range(depth):
        outer = AnyValue()
        outer.kvlist_value.values.add(key="k").value.CopyFrom(value)
        value = outer
    return value


def spoiled(raw: bytes) -> bytes:
    return raw.replace(BAD.encode(), b"B" * 7 + b"\xff")


def traces(names: list[list[list[str]]], *, deep: bool = False) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for scopes in names:
        resource = request.resource_spans.add(schema_url="resource")
        resource.resource.attributes.add(key="service.name").value.string_value = "agent"
        for spans in scopes:
            scope = resource.scope_spans.add(schema_url="scope")
            scope.scope.name = "scope"
            for number, name in enumerate(spans):
                span = scope.spans.add(name="span" if deep else name, trace_id=bytes(16), span_id=number.to_bytes(8))
                if deep and name == BAD:
                    span.attributes.add(key="deep").value.CopyFrom(nested(90))
    return request


@pytest.mark.parametrize("above", ["request", "resource", "scope"])
def test_unknown_fields_beside_unreadable_ones_are_limited(above: str) -> None:
    """Each costs a step and a tuple. Within a span, which is not walked, their number is not limited."""
    foreign = b"\x78\x01" * (4 << 20)
    span = spoiled(traces([[[BAD]]]).SerializeToString())
    inside = {"request": foreign, "resource": varint(10) + varint(len(foreign)) + foreign}
    inside["scope"] = varint(10) + varint(len(foreign) + 5) + varint(18) + varint(len(foreign)) + foreign
    with pytest.raises(DataError, match="fields beside its items"):
        remove_unreadable("traces", span + inside[above])
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add().MergeFromString(foreign)
    assert remove_unreadable("traces", span + request.SerializeToString())[1] == 1


def test_a_piece_of_too_many_parts_is_not_parsed() -> None:
    span = spoiled(traces([[[BAD]]]).SerializeToString())
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add().MergeFromString(b"\x4a\0" * (MAX_MESSAGES + 1))
    with pytest.raises(DataError, match="attributes, events, points and the like"):
        remove_unreadable("traces", span + request.SerializeToString())


NAMES = st.lists(st.lists(st.lists(st.sampled_from(["good", "fine", BAD]), max_size=3), max_size=3), min_size=1, max_size=3)


@given(NAMES, st.booleans())
def test_only_unreadable_spans_are_removed(names: list[list[list[str]]], deep: bool) -> None:
    bad = sum(name == BAD for scopes in names for spans in scopes for name in spans)
    raw = traces(names, deep=deep).SerializeToString()
    kept, removed = remove_unreadable("traces", raw if deep else spoiled(raw))
    assert removed == bad
    whole = traces(names, deep=deep)
    for resource in whole.resource_spans:
        for scope in resource.scope_spans:
            good = [s for s in scope.spans if s.name != BAD and not s.attributes]
            del scope.spans[:]
            scope.spans.extend(good)
    assert ExportTraceServiceRequest.FromString(kept) == whole


def test_an_unreadable_resource_is_removed_with_its_spans() -> None:
    request = traces([[["a", "b"], ["c"]], [["d"]]])
    request.resource_spans[0].resource.attributes[0].value.string_value = BAD
    kept, removed = remove_unreadable("traces", spoiled(request.SerializeToString()))
    assert removed == 3
    assert [s.name for r in ExportTraceServiceRequest.FromString(kept).resource_spans for g in r.scope_spans for s in g.spans] == ["d"]


def test_only_unreadable_log_records_and_data_points_are_removed() -> None:
    logs = ExportLogsServiceRequest()
    records = logs.resource_logs.add().scope_logs.add().log_records
    for body in ("good", BAD):
        records.add().body.string_value = body
    records.add().body.CopyFrom(nested(90))
    kept, removed = remove_unreadable("logs", spoiled(logs.SerializeToString()))
    (found,) = ExportLogsServiceRequest.FromString(kept).resource_logs[0].scope_logs[0].log_records
    assert (found.body.string_value, removed) == ("good", 2)
    metrics = ExportMetricsServiceRequest()
    own = metrics.resource_metrics.add().scope_metrics.add().metrics
    gauge, named = own.add(name="gauge").gauge, own.add(name=BAD).sum
    for value in ("good", BAD):
        gauge.data_points.add(as_int=1).attributes.add(key="k").value.string_value = value
    named.data_points.add()
    named.data_points.add()
    kept, removed = remove_unreadable("metrics", spoiled(metrics.SerializeToString()))
    (left,) = ExportMetricsServiceRequest.FromString(kept).resource_metrics[0].scope_metrics[0].metrics
    assert (left.name, len(left.gauge.data_points), removed) == ("gauge", 1, 3)


@given(st.binary(max_size=60))
def test_any_bytes_are_split_or_refused(raw: bytes) -> None:
    try:
        kept, removed = remove_unreadable("traces", raw)
    except DecodeError:
        return
    ExportTraceServiceRequest.FromString(kept)
    assert removed >= 0


def test_bytes_that_are_not_a_message_are_a_decode_error() -> None:
    with pytest.raises(DecodeError):
        remove_unreadable("traces", b"\xff\xff")
