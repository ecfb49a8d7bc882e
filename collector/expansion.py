"""How large the rows of a request are. Pure.

OTLP gives a resource, a scope and a metric's name once for many spans, log records or points; each of their rows has all of it. So a
request of a megabyte can become gigabytes of rows. What is shared is measured once for each resource and scope, from its bytes: no step
for each span, and no look at a value. A row also has names of columns, and separators for whatever it holds.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.journal import Request, Signal
from agl_otel.errors import DataError

Parsed = ExportTraceServiceRequest | ExportLogsServiceRequest | ExportMetricsServiceRequest
MESSAGES: Final[dict[Signal, type[Parsed]]] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
ROW_BYTES: Final = 512
"""Of an empty row in JSON: 375 (a gauge's) to 544 (an exponential histogram's)."""
MESSAGE_BYTES: Final = 16
"""Of a message in a row, beside what it holds: 7 (an event) to 15 (an exemplar), two of an attribute up to 26."""
_LONGER: Final = bytes(range(0x20)) + b'"\\'
"""Bytes that may take six in a row's JSON. Tags and lengths are among them, and make up for short values, whose texts are longer."""


_CONTROL: Final = bytes(set(range(0x20)) - set(b"\b\t\n\f\r"))
"""Bytes that take six in JSON as characters, and seven in a list or an object, whose text is JSON in JSON."""
_OF_A_MESSAGE: Final = 6
"""At most so many of them are no characters but tags, lengths and numbers: a double that is a short fraction has as many zeros."""


def check(request: Parsed, raw: bytes, messages: int, limit: int) -> int:
    """How large the rows of a request of these bytes and so many messages are, about, in bytes.

    Raises DataError where that is more than `limit`.
    """
    found = _own(raw, messages) + _rows(request)
    if found > limit:
        raise DataError(
            f"its rows would take about {found} bytes, more than AGL_MAX_EXPANDED_BYTES ({limit}): each has its whole resource and scope; "
            "send a smaller resource, or fewer items in a request"
        )
    return found


def size_of(request: Request) -> int:
    """The same of a request in the log, where one was not noted at receipt."""
    return request.expanded or _own(request.raw) + _rows(MESSAGES[request.signal].FromString(request.raw))


def _own(raw: bytes, messages: int = 0) -> int:
    """What the rows have of their own values."""
    escaped = len(raw) - len(raw.translate(None, _CONTROL)) - messages * _OF_A_MESSAGE
    return len(raw) + 6 * max(0, escaped) + messages * MESSAGE_BYTES


def _rows(request: Parsed) -> int:
    """What the rows have without their own values."""
    if isinstance(request, ExportTraceServiceRequest):
        found = 0
        for group in request.resource_spans:
            shared = ROW_BYTES + _text(group.resource.SerializeToString())
            for part in group.scope_spans:
                found += len(part.spans) * (shared + len(part.scope.name) + len(part.scope.version))
        return found
    if isinstance(request, ExportLogsServiceRequest):
        found = 0
        for logs in request.resource_logs:
            shared = ROW_BYTES + _text(logs.resource.SerializeToString()) + len(logs.schema_url)
            for part in logs.scope_logs:
                found += len(part.log_records) * (shared + _text(part.scope.SerializeToString()) + len(part.schema_url))
        return found
    found = 0
    for metrics in request.resource_metrics:
        shared = ROW_BYTES + _text(metrics.resource.SerializeToString()) + len(metrics.schema_url)
        for part in metrics.scope_metrics:
            own = shared + _text(part.scope.SerializeToString()) + len(part.schema_url)
            for metric in part.metrics:
                kind = metric.WhichOneof("data")
                points = len(getattr(metric, kind).data_points) if kind is not None else 0
                found += points * (own + len(metric.name) + len(metric.description) + len(metric.unit))
    return found


def _text(data: bytes) -> int:
    return len(data) + 5 * (len(data) - len(data.translate(None, _LONGER)))
