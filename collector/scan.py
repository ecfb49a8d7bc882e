"""What identification needs of a request, read once at its receipt. Pure.

This is the specification, which the compiled core (native/) is held to, and what reads requests where it is not installed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.values import TOKEN_COLUMNS
from agl_otel_hook import conventions

EARLIEST_UNIX_NANO: Final = 946_684_800 * 10**9  # 2000-01-01: ClickHouse would wrap times far outside its range to another year
AHEAD_NANO: Final = 24 * 3600 * 10**9
MAX_SPAN_TOKENS: Final = 1 << 21  # twice the longest context of self-hosted models

TRACE_ID: Final = "trace id is not 16 bytes (in JSON 32 hexadecimal digits) or all zero"
SPAN_ID: Final = "span id is not 8 bytes (in JSON 16 hexadecimal digits) or all zero"
PARENT_ID: Final = "parent span id is not 8 bytes (in JSON 16 hexadecimal digits)"
TIMESTAMP: Final = "timestamp before 2000 or more than a day ahead (they are Unix nanoseconds)"
TOO_MANY_ATTRIBUTES: Final = "more attributes than AGL_MAX_SPAN_ATTRIBUTES"
TOO_MANY_TOKENS: Final = f"more than {MAX_SPAN_TOKENS} token ids or log-probs in a list"

ID_KEYS: Final = (conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID)
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)


class Scan(NamedTuple):
    """A request's items (spans or log records) as columns, in the order of the request."""

    trace_ids: Sequence[bytes]
    span_ids: Sequence[bytes]
    parent_ids: Sequence[bytes]
    """Of spans; log records have none."""
    groups: Sequence[int]
    """How many items each resource has."""
    resources: Sequence[bytes]
    """The attributes of each resource that are ids, as a serialised KeyValueList."""
    own: Sequence[tuple[int, bytes]]
    """The same of the items: of so many in a row, all of one resource."""
    defects: Sequence[tuple[int, str]] = ()
    """The items that are refused, with the reason."""
    opening: Sequence[int] = ()
    """The attempt spans that are roots, and open their traces."""
    silent: Sequence[int] = ()
    """Attempt spans and seals: a heartbeat, but they do not set an attempt to running."""


def scan_spans(request: ExportTraceServiceRequest, *, latest: int, max_attributes: int) -> Scan:
    """Read a request's spans; a time after `latest` (Unix nanoseconds) is a defect, and so are more attributes than `max_attributes`."""
    groups = [[span for scope in group.scope_spans for span in scope.spans] for group in request.resource_spans]
    spans = [span for group in groups for span in group]
    return Scan(
        [span.trace_id for span in spans],
        [span.span_id for span in spans],
        [span.parent_span_id for span in spans],
        list(map(len, groups)),
        [id_attributes(group.resource.attributes) for group in request.resource_spans],
        [run for group in groups for run in _runs(id_attributes(span.attributes) for span in group)],
        [(index, defect) for index, span in enumerate(spans) if (defect := _span_defect(span, latest, max_attributes))],
        [index for index, span in enumerate(spans) if span.name == conventions.SPAN_ATTEMPT and not any(span.parent_span_id)],
        [index for index, span in enumerate(spans) if span.name in (conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL)],
    )


def scan_records(request: ExportLogsServiceRequest, *, latest: int) -> Scan:
    """Read a request's log records; see `scan_spans`."""
    groups = [[record for scope in group.scope_logs for record in scope.log_records] for group in request.resource_logs]
    records = [record for group in groups for record in group]
    return Scan(
        [record.trace_id for record in records],
        [record.span_id for record in records],
        [],
        list(map(len, groups)),
        [id_attributes(group.resource.attributes) for group in request.resource_logs],
        [run for group in groups for run in _runs(id_attributes(record.attributes) for record in group)],
        [(index, defect) for index, record in enumerate(records) if (defect := _record_defect(record, latest))],
    )


def within(indexes: Sequence[int], start: int, end: int) -> Sequence[int]:
    """Return those of ascending indexes that are from `start` to before `end`."""
    return indexes[bisect_left(indexes, start) : bisect_left(indexes, end)]


def _runs(ids: Iterable[bytes]) -> list[tuple[int, bytes]]:
    return [(sum(1 for _ in run), own) for own, run in groupby(ids)]


def id_attributes(attributes: Iterable[KeyValue]) -> bytes:
    """Serialise the attributes that are ids, as a KeyValueList."""
    return KeyValueList(values=[each for each in attributes if each.key in ID_KEYS]).SerializeToString()


def _span_defect(span: Span, latest: int, max_attributes: int) -> str:
    if len(span.trace_id) != 16 or span.trace_id == _NO_TRACE:
        return TRACE_ID
    if len(span.span_id) != 8 or span.span_id == _NO_SPAN:
        return SPAN_ID
    if len(span.parent_span_id) not in {0, 8}:
        return PARENT_ID
    times = range(EARLIEST_UNIX_NANO, latest + 1)
    if span.start_time_unix_nano not in times or span.end_time_unix_nano not in times:
        return TIMESTAMP
    if any(event.time_unix_nano > latest for event in span.events):
        return TIMESTAMP
    if len(span.attributes) > max_attributes:
        return TOO_MANY_ATTRIBUTES
    if any(len(each.value.array_value.values) > MAX_SPAN_TOKENS for each in span.attributes if each.key in TOKEN_COLUMNS):
        return TOO_MANY_TOKENS
    return ""


def _record_defect(record: LogRecord, latest: int) -> str:
    if len(record.trace_id) not in {0, 16}:
        return TRACE_ID
    if len(record.span_id) not in {0, 8}:
        return SPAN_ID
    stamp = record.time_unix_nano or record.observed_time_unix_nano
    if stamp and stamp not in range(EARLIEST_UNIX_NANO, latest + 1):
        return TIMESTAMP
    return ""
