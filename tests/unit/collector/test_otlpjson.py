"""OTLP/JSON is parsed to the same messages as the request in protobuf."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.otlpjson import to_protobuf
from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel.collector.unreadable import remove_unreadable
from agl_otel.errors import DataError

TRACE, SPAN, PARENT = "5b8EFFF798038103D269B633813FC60c", "eee19b7ec3c1b174", "EEE19B7EC3C1B173"


def spans(**fields: Any) -> Any:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": TRACE, "spanId": SPAN, "name": "work", **fields}]}]}]}
    return ExportTraceServiceRequest.FromString(to_protobuf(ExportTraceServiceRequest, json.dumps(body).encode()))


def span(**fields: Any) -> Any:
    return spans(**fields).resource_spans[0].scope_spans[0].spans[0]


def test_ids_are_hex_in_every_field() -> None:
    found = span(parentSpanId=PARENT, links=[{"traceId": TRACE, "spanId": PARENT}])
    assert (found.trace_id.hex(), found.span_id.hex(), found.parent_span_id.hex()) == (TRACE.lower(), SPAN, PARENT.lower())
    assert (found.links[0].trace_id.hex(), found.links[0].span_id.hex()) == (TRACE.lower(), PARENT.lower())
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"traceId": TRACE, "spanId": SPAN, "timeUnixNano": "1"}]}]}]}
    record = ExportLogsServiceRequest.FromString(to_protobuf(ExportLogsServiceRequest, json.dumps(logs).encode()))
    assert record.resource_logs[0].scope_logs[0].log_records[0].trace_id.hex() == TRACE.lower()
    point = {"asInt": "5", "exemplars": [{"traceId": TRACE, "spanId": SPAN, "asDouble": 1.5}]}
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "m", "sum": {"dataPoints": [point]}}]}]}]}
    metric = ExportMetricsServiceRequest.FromString(to_protobuf(ExportMetricsServiceRequest, json.dumps(metrics).encode()))
    assert metric.resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points[0].exemplars[0].span_id.hex() == SPAN


def test_numbers_may_be_strings_and_enums_are_numbers() -> None:
    values = [
        {"key": "i", "value": {"intValue": "-9223372036854775808"}},
        {"key": "n", "value": {"intValue": 7}},
        {"key": "d", "value": {"doubleValue": 1}},
        {"key": "nan", "value": {"doubleValue": "NaN"}},
        {"key": "b", "value": {"bytesValue": "AAEC"}},
        {"key": "a", "value": {"arrayValue": {"values": [{"boolValue": True}, {"stringValue": "é"}]}}},
        {"key": "traceId", "value": {"stringValue": "not an id"}},
    ]
    found = span(
        kind=3, status={"code": 2}, startTimeUnixNano="1544712660000000000", endTimeUnixNano=1544712661000000000, attributes=values
    )
    assert (found.kind, found.status.code, found.start_time_unix_nano) == (3, 2, 1544712660000000000)
    texts = {a.key: a.value for a in found.attributes}
    assert (texts["i"].int_value, texts["n"].int_value, texts["d"].double_value) == (-(2**63), 7, 1.0)
    assert texts["nan"].double_value != texts["nan"].double_value
    assert (texts["b"].bytes_value, texts["traceId"].string_value) == (b"\0\1\2", "not an id")
    assert [v.WhichOneof("value") for v in texts["a"].array_value.values] == ["bool_value", "string_value"]


def test_fields_of_a_later_version_are_skipped() -> None:
    assert span(somethingNew={"a": [1]}).name == "work"


@pytest.mark.parametrize(
    "field", ["resourceSpans", "resourceLogs", "resourceMetrics", "resource_spans", "resource_logs", "resource_metrics"]
)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.signal)
def test_items_of_another_signal_are_refused_with_their_path(protocol: Protocol, field: str) -> None:
    path = {"s": "/v1/traces", "l": "/v1/logs", "m": "/v1/metrics"}[field.removeprefix("resource").strip("_").lower()[0]]
    body = json.dumps({field: [{}], "another": [{}]}).encode()
    if path == protocol.path:
        assert to_protobuf(protocol.request, body)
        return
    with pytest.raises(DataError, match=f"it has {field}, which belong to {path}"):
        to_protobuf(protocol.request, body)
    assert to_protobuf(protocol.request, json.dumps({field: []}).encode()) == b""


@pytest.mark.parametrize("wrong", ["xyz", "5b8", "5b 8efff798038103d269b633813fc60c", 7, {"a": 1}])
def test_an_id_that_is_not_hex_rejects_only_its_span(wrong: Any) -> None:
    found = spans(traceId=wrong, parentSpanId=wrong).resource_spans[0].scope_spans[0].spans[0]
    assert len(found.trace_id) not in (0, 16)
    assert len(found.parent_span_id) not in (0, 8)


@pytest.mark.parametrize("bad", [b"\\ud800", b"\\uDC00\\ud83d", b"\xff", b"\xed\xa0\x80", b"caf\xe9"])
@pytest.mark.parametrize("place", ["name", "key", "value", "body"])
def test_text_that_is_not_utf8_rejects_only_its_span(bad: bytes, place: str) -> None:
    item = {"name": "work", "attributes": [{"key": "k", "value": {"stringValue": "v"}}]}
    spoiled = {"name": {"name": "BAD"}, "key": {"attributes": [{"key": "BAD"}]}}.get(
        place, {"attributes": [{"key": "k", "value": {"stringValue": "BAD"}}]}
    )
    if place == "body":
        records = [{"body": {"stringValue": "\U0001f600"}}, {"body": {"stringValue": "a BAD b"}}]
        body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()
        raw, removed = remove_unreadable("logs", to_protobuf(ExportLogsServiceRequest, body.replace(b"BAD", bad)))
        (record,) = ExportLogsServiceRequest.FromString(raw).resource_logs[0].scope_logs[0].log_records
        assert (record.body.string_value, removed) == ("\U0001f600", 1)
        return
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [item, {**item, **spoiled}, item]}]}]}).encode()
    raw, removed = remove_unreadable("traces", to_protobuf(ExportTraceServiceRequest, body.replace(b"BAD", bad)))
    assert [found.name for found in ExportTraceServiceRequest.FromString(raw).resource_spans[0].scope_spans[0].spans] == ["work", "work"]
    assert removed == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"resourceSpans": 3}',
        b'{"resourceSpans": [3]}',
        b"[" * 100_000,
        b'{"resourceSpans": "\\ud800"}',
        b"\xff\xfe",
    ],
)
def test_json_that_is_not_a_request_is_a_data_error(body: bytes) -> None:
    with pytest.raises(DataError, match="ExportTraceServiceRequest as OTLP/JSON"):
        to_protobuf(ExportTraceServiceRequest, body)
