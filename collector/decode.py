"""OTLP protobuf → rows of otel_traces and otel_logs, exact for every value (values.py says how).

This is the specification of the rows, which the compiled core (native/) is held to, and what makes them where it is not installed. Token
ids and log-probs of a model call go directly into their columns if they fit exactly; their long text is then left out of the map
(AttrTypes: `column`).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.identities import Identities
from agl_otel.collector.values import REPEATED, TOKEN_COLUMNS, encode, logprobs, to_map, token_ids
from agl_otel_hook import conventions

T = TypeVar("T")
SPAN_KINDS: Final = ("Unspecified", "Internal", "Server", "Client", "Producer", "Consumer")
STATUS_CODES: Final = ("Unset", "Ok", "Error")
SERVICE_NAME: Final = "service.name"

TRACE_COLUMNS: Final = (
    "Timestamp", "TraceId", "SpanId", "ParentSpanId", "TraceState", "SpanName", "SpanKind", "ServiceName", "ResourceAttributes",
    "ScopeName", "ScopeVersion", "SpanAttributes", "Duration", "StatusCode", "StatusMessage", "Events.Timestamp", "Events.Name",
    "Events.Attributes", "Links.TraceId", "Links.SpanId", "Links.TraceState", "Links.Attributes", "RolloutId", "AttemptId",
    "SequenceId", "PromptTokenIds", "ResponseTokenIds", "ResponseLogprobs", "AttrTypes", "ReceivedAt", "BatchId", "BatchPos",
)  # fmt: skip
LOG_COLUMNS: Final = (
    "Timestamp", "TraceId", "SpanId", "TraceFlags", "SeverityText", "SeverityNumber", "ServiceName", "Body", "ResourceSchemaUrl",
    "ResourceAttributes", "ScopeSchemaUrl", "ScopeName", "ScopeVersion", "ScopeAttributes", "LogAttributes", "EventName",
    "RolloutId", "AttemptId", "SequenceId", "AttrTypes", "ReceivedAt", "BatchId", "BatchPos",
)  # fmt: skip

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def span_rows(raw: bytes, accepted: Accepted, *, received_ms: int, batch: int, counts: Counter[str] | None = None) -> list[str]:
    """Return the rows (JSON texts) of the accepted spans; `counts`: see values.to_map."""
    rows: list[str] = []
    for resource_spans in ExportTraceServiceRequest.FromString(raw).resource_spans:
        resource_types: dict[str, str] = {}
        resource = to_map(resource_spans.resource.attributes, resource_types, "resource:", counts=counts)
        for scope_spans in resource_spans.scope_spans:
            scope = scope_spans.scope
            shared = {
                "ServiceName": resource.get(SERVICE_NAME, ""),
                "ResourceAttributes": resource,
                "ScopeName": scope.name,
                "ScopeVersion": scope.version,
                "ReceivedAt": _milliseconds(received_ms),
                "BatchId": batch,
            }
            for span, own in accepted.among(scope_spans.spans):
                rows.append(_dumps(shared | _span(span, dict(resource_types), counts) | own))
    return rows


def _span(span: Span, types: dict[str, str], counts: Counter[str] | None) -> dict[str, Any]:
    tokens, attributes = split_tokens(span, types, counts)
    row: dict[str, Any] = {
        "Timestamp": _nanoseconds(span.start_time_unix_nano),
        "TraceId": span.trace_id.hex(),
        "SpanId": span.span_id.hex(),
        "ParentSpanId": span.parent_span_id.hex() if any(span.parent_span_id) else "",
        "TraceState": span.trace_state,
        "SpanName": span.name,
        "SpanKind": SPAN_KINDS[span.kind] if 0 <= span.kind < len(SPAN_KINDS) else SPAN_KINDS[0],
        "SpanAttributes": attributes,
        "Duration": max(0, span.end_time_unix_nano - span.start_time_unix_nano),
        "StatusCode": STATUS_CODES[span.status.code] if 0 <= span.status.code < len(STATUS_CODES) else STATUS_CODES[0],
        "StatusMessage": span.status.message,
        "AttrTypes": types,
    }
    row |= tokens
    if span.events:
        row["Events.Timestamp"] = [_nanoseconds(event.time_unix_nano) for event in span.events]
        row["Events.Name"] = [event.name for event in span.events]
        row["Events.Attributes"] = [to_map(event.attributes, types, f"event.{n}:", counts=counts) for n, event in enumerate(span.events)]
    if span.links:
        row["Links.TraceId"] = [link.trace_id.hex() for link in span.links]
        row["Links.SpanId"] = [link.span_id.hex() for link in span.links]
        row["Links.TraceState"] = [link.trace_state for link in span.links]
        row["Links.Attributes"] = [to_map(link.attributes, types, f"link.{n}:", counts=counts) for n, link in enumerate(span.links)]
    return row


def split_tokens(span: Span, types: dict[str, str], counts: Counter[str] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (token columns, attribute texts). A list that does not fit its column exactly stays in the map; its column gets what fits."""
    columns: dict[str, Any] = {}
    moved: set[str] = set()
    for attribute in span.attributes:
        column = TOKEN_COLUMNS.get(attribute.key)
        if column is None or column in columns:
            continue
        if attribute.key == conventions.LLM_RESPONSE_LOGPROBS:
            columns[column], fits = logprobs(attribute.value)
        else:
            ids = token_ids(attribute.value)
            columns[column], fits = ids or [], ids is not None
        if fits:
            moved.add(attribute.key)
    return columns, to_map(span.attributes, types, counts=counts, columns=moved)


def log_rows(raw: bytes, accepted: Accepted, *, received_ms: int, batch: int, counts: Counter[str] | None = None) -> list[str]:
    """Return the rows (JSON texts) of the accepted log records; see `span_rows`."""
    counts = Counter() if counts is None else counts
    rows: list[str] = []
    for resource_logs in ExportLogsServiceRequest.FromString(raw).resource_logs:
        resource_types: dict[str, str] = {}
        resource = to_map(resource_logs.resource.attributes, resource_types, "resource:", counts=counts)
        for scope_logs in resource_logs.scope_logs:
            scope_types = dict(resource_types)
            shared = {
                "ServiceName": resource.get(SERVICE_NAME, ""),
                "ResourceSchemaUrl": resource_logs.schema_url,
                "ResourceAttributes": resource,
                "ScopeSchemaUrl": scope_logs.schema_url,
                "ScopeName": scope_logs.scope.name,
                "ScopeVersion": scope_logs.scope.version,
                "ScopeAttributes": to_map(scope_logs.scope.attributes, scope_types, "scope:", counts=counts),
                "ReceivedAt": _milliseconds(received_ms),
                "BatchId": batch,
            }
            for record, own in accepted.among(scope_logs.log_records):
                rows.append(_dumps(shared | _record(record, received_ms, dict(scope_types), counts) | own))
    return rows


def _record(record: LogRecord, received_ms: int, types: dict[str, str], counts: Counter[str]) -> dict[str, Any]:
    body, body_type = encode(record.body, record.body.WhichOneof("value"), counts)
    if body_type not in {"string", "empty"}:
        types["body:"] = body_type
    return {
        "Timestamp": _nanoseconds(record.time_unix_nano or record.observed_time_unix_nano or received_ms * 10**6),
        "TraceId": record.trace_id.hex() if any(record.trace_id) else "",
        "SpanId": record.span_id.hex() if any(record.span_id) else "",
        "TraceFlags": record.flags & 0xFF,
        "SeverityText": record.severity_text,
        "SeverityNumber": record.severity_number & 0xFF,
        "Body": body,
        "LogAttributes": to_map(record.attributes, types, counts=counts),
        "EventName": record.event_name,
        "AttrTypes": types,
    }


class Accepted:
    """The accepted items of a request, with what identification and the batch say of each.

    Args:
        identities: one for each item of the request.
        numbers: the sequence number of each accepted item in turn.
        first: BatchPos of the first accepted item.
        only: the BatchPos of the items that become rows; None: all.
    """

    def __init__(self, identities: Identities, numbers: Iterator[int], first: int = 0, only: Container[int] | None = None) -> None:
        self._identities = iter(identities)
        self._numbers = numbers
        self._positions = itertools.count(first)
        self._only = only

    def among(self, items: Iterable[T]) -> Iterator[tuple[T, dict[str, Any]]]:
        """Yield (item, its columns) for those that become rows of the request's next items."""
        for item in items:
            identity = next(self._identities)
            if identity.reason:
                continue
            number, position = next(self._numbers), next(self._positions)
            if self._only is None or position in self._only:
                ids = {"RolloutId": identity.rollout_id, "AttemptId": identity.attempt_id}
                yield item, {**ids, "SequenceId": number, "BatchPos": position}


class JsonRows:
    """Rows of one table as JSON (core.Rows)."""

    format_name = "JSONEachRow"

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.rows: list[str] = []
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> int:
        """The number of repeated attribute keys, which were dropped."""
        return self.counts[REPEATED]

    def take(self) -> Iterable[bytes]:
        """Return the rows."""
        return ["\n".join(self.rows).encode()]


def _nanoseconds(stamp: int) -> str | int:
    # ClickHouse parses "seconds.fraction" only if the seconds have nine or ten digits; 0 (an event without a time) is sent as a number.
    return f"{stamp // 10**9}.{stamp % 10**9:09d}" if stamp >= 10**17 else 0


def _milliseconds(stamp: int) -> str:
    return f"{stamp // 1000}.{stamp % 1000:03d}"
