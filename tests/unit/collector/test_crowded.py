"""Requests of very many next to empty parts are refused before they are read; real ones, small and large, are not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from agl_otel.collector.crowded import FEW_PARTS, MAX_PARTS, check, check_json
from agl_otel.collector.otlpjson import to_protobuf
from agl_otel.errors import DataError

MIB = 1 << 20


def request(*spans: Span) -> bytes:
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]).SerializeToString()


@pytest.mark.parametrize(
    "raw",
    [
        b"\n\0" * MIB,
        ResourceSpans(scope_spans=[ScopeSpans()] * MIB).SerializeToString().join((b"\n\xff\xff\xff\x7f", b"")),
        request(*[Span()] * MIB),
        request(*[Span()] * (FEW_PARTS * 10)),
        request(*[Span(trace_id=b"t" * 16, span_id=b"s" * 8)] * (MAX_PARTS + 1)),
    ],
    ids=["resources", "scopes", "spans", "fewer spans", "too many whole ones"],
)
def test_a_crowded_request_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError, match="send smaller batches"):
        check(raw)


def test_real_requests_pass() -> None:
    span = Span(trace_id=b"t" * 16, span_id=b"s" * 8)
    for raw in (b"", request(), request(*[Span()] * FEW_PARTS), request(*[span] * (MAX_PARTS - 2))):
        check(raw)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_request_are_left_to_the_reader(raw: bytes) -> None:
    check(raw + bytes(FEW_PARTS * 16))


def test_json_of_empty_objects_is_refused_and_dense_real_json_is_not() -> None:
    with pytest.raises(DataError, match="send smaller batches"):
        to_protobuf(ExportTraceServiceRequest, b'{"resourceSpans":[' + b"{}," * MIB + b"{}]}")
    numbers = [{"intValue": "1"}] * 100_000
    check_json(json.dumps({"values": numbers}, separators=(",", ":")).encode())
