"""Estimate the size of a request's rows. Pure.

OTLP holds a resource, a scope and a metric's name once for many spans, log records or points; each of their rows repeats them. A
request of a megabyte can therefore become gigabytes of rows. Shared parts are measured once per resource and scope, from their bytes:
no step per span, and no value is inspected. A row also has column names, and separators between its contents.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.journal import Request, Signal
from agl_otel.errors import CrowdedError

Parsed = ExportTraceServiceRequest | ExportLogsServiceRequest | ExportMetricsServiceRequest
MESSAGES: Final[dict[Signal, type[Parsed]]] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
ROW_BYTES: Final = 512
"""Size of an empty row in JSON: 375 (a gauge's) to 544 (an exponential histogram's)."""
MESSAGE_BYTES: Final = 16
"""Overhead of a message in a row: 7 (an event) to 15 (an exemplar), up to 26 for the two of an attribute."""
_LONGER: Final = bytes(range(0x20)) + b'"\\'
"""Bytes that may take six in a row's JSON. Tags and lengths also match, which offsets short values whose text is longer."""


_CONTROL: Final = bytes(set(range(0x20)) - set(b"\b\t\n\f\r"))
"""Bytes that take six in JSON as characters, and seven inside a list or an object, whose text is JSON within JSON."""
_OF_A_MESSAGE: Final = 6
"""Maximum per message of these bytes that are tags, lengths and numbers, not characters: a double may end in as many zeros."""


def size(request: Parsed, raw: bytes, messages: int) -> int:
    """Return the approximate size in bytes of the rows of a request with `messages` messages."""
    return _own(raw, messages) + _rows(request)


def check(found: int, limit: int) -> int:
    """Return the size of a request's rows. Raises CrowdedError if it exceeds `limit` bytes."""
    if found > limit:
        raise CrowdedError(
            f"its rows would take about {found} bytes, more than AGL_MAX_EXPANDED_BYTES ({limit}): each has its whole resource and scope; "
            "send a smaller resource, or fewer items in a request"
        )
    return found


def size_of(request: Request) -> int:
    """Return the size of a logged request's rows, as noted at receipt or else computed now."""
    return request.expanded or _own(request.raw) + _rows(MESSAGES[request.signal].FromString(request.raw))


def _own(raw: bytes, messages: int = 0) -> int:
    """Estimate the part of the rows that comes from their own values."""
    escaped = len(raw) - len(raw.translate(None, _CONTROL)) - messages * _OF_A_MESSAGE
    return len(raw) + 6 * max(0, escaped) + messages * MESSAGE_BYTES


def _rows(request: Parsed) -> int:
    """Estimate the part of the rows that is shared or fixed: resource, scope, column names."""
    if isinstance(request, ExportTraceServiceRequest):
        found = 0
        for group in request.resource_spans:
            shared = ROW_BYTES + _text(group.resource.SerializeToString())
            for part in group.scope_spans:
                found += len(part.spans) * (shared + _bytes(part.scope.name) + _bytes(part.scope.version))
        return found
    if isinstance(request, ExportLogsServiceRequest):
        found = 0
        for logs in request.resource_logs:
            shared = ROW_BYTES + _text(logs.resource.SerializeToString()) + _bytes(logs.schema_url)
            for part in logs.scope_logs:
                found += len(part.log_records) * (shared + _text(part.scope.SerializeToString()) + _bytes(part.schema_url))
        return found
    found = 0
    for metrics in request.resource_metrics:
        shared = ROW_BYTES + _text(metrics.resource.SerializeToString()) + _bytes(metrics.schema_url)
        for part in metrics.scope_metrics:
            own = shared + _text(part.scope.SerializeToString()) + _bytes(part.schema_url)
            for metric in part.metrics:
                kind = metric.WhichOneof("data")
                points = len(getattr(metric, kind).data_points) if kind is not None else 0
                found += points * (own + sum(map(_bytes, (metric.name, metric.description, metric.unit))))
    return found


def _bytes(text: str) -> int:
    return len(text.encode())


def _text(data: bytes) -> int:
    return len(data) + 5 * (len(data) - len(data.translate(None, _LONGER)))
