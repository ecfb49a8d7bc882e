"""Encode spans in the JSON of Jaeger's older HTTP API, which Jaeger's UI reads. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from agl_otel.types import Span
from agl_otel.web.jaeger.spans import NO_SERVICE, SERVICE_NAME, WARNINGS, Attempts, traces_data

_KINDS: Final[Mapping[int, str]] = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_STATUS: Final[Mapping[int, str]] = {Status.STATUS_CODE_OK: "OK", Status.STATUS_CODE_ERROR: "ERROR"}
Json = dict[str, Any]


def trace_json(spans: Sequence[Span], attempts: Attempts) -> Json:
    """Encode one trace, with the tags of its attempts."""
    processes: dict[str, Json] = {}
    names: dict[str, str] = {}
    made: list[Json] = []
    for data in traces_data(spans, attempts):
        for group in data.resource_spans:
            process = _process(group)
            name = names.setdefault(json.dumps(process, sort_keys=True), f"p{len(names) + 1}")
            processes[name] = process
            made += [_span(span, scope, name) for scope in group.scope_spans for span in scope.spans]
    return {"traceID": spans[0].trace_id, "spans": made, "processes": processes, "warnings": spans[0].attributes.get(WARNINGS)}


def _process(group: ResourceSpans) -> Json:
    tags = _tags(group.resource.attributes)
    service = next((str(tag["value"]) for tag in tags if tag["key"] == SERVICE_NAME), NO_SERVICE)
    return {"serviceName": service, "tags": [tag for tag in tags if tag["key"] != SERVICE_NAME]}


def _span(span: OtlpSpan, scope: ScopeSpans, process: str) -> Json:
    extra: dict[str, Any] = {"otel.scope.name": scope.scope.name, "otel.scope.version": scope.scope.version}
    extra |= {"span.kind": _KINDS.get(span.kind, ""), "otel.status_code": _STATUS.get(span.status.code, "")}
    extra["otel.status_description"] = span.status.message
    tags = _tags(span.attributes) + [{"key": key, "type": "string", "value": value} for key, value in extra.items() if value]
    if span.status.code == Status.STATUS_CODE_ERROR:
        tags.append({"key": "error", "type": "bool", "value": True})
    parent = [_reference("CHILD_OF", span.trace_id, span.parent_span_id)] if span.parent_span_id else []
    return {
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex(),
        "operationName": span.name,
        "references": parent + [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links],
        "startTime": span.start_time_unix_nano // 1000,
        "duration": (span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "tags": tags,
        "logs": [
            {
                "timestamp": event.time_unix_nano // 1000,
                "fields": [{"key": "event", "type": "string", "value": event.name}, *_tags(event.attributes)],
            }
            for event in span.events
        ],
        "processID": process,
        "warnings": None,
    }


def _reference(kind: str, trace_id: bytes, span_id: bytes) -> Json:
    return {"refType": kind, "traceID": trace_id.hex(), "spanID": span_id.hex()}


def _tags(attributes: Sequence[KeyValue]) -> list[Json]:
    return [{"key": pair.key, **_value(pair.value)} for pair in attributes]


def _value(value: AnyValue) -> Json:
    match value.WhichOneof("value"):
        case "bool_value":
            return {"type": "bool", "value": value.bool_value}
        case "int_value":
            return {"type": "int64", "value": value.int_value}
        case "double_value":
            return {"type": "float64", "value": value.double_value}
        case "bytes_value":
            return {"type": "binary", "value": value.bytes_value.hex()}
        case "array_value" | "kvlist_value":
            return {"type": "string", "value": json.dumps(_plain(value), ensure_ascii=False)}
        case _:
            return {"type": "string", "value": value.string_value}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind) if kind else None
