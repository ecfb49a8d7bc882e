"""How large the rows of a request are. Pure.

OTLP gives a resource, a scope and a metric's name once for many spans, log records or points; each of their rows has all of it. So a
request of a megabyte can become gigabytes of rows. What is shared is measured once for each resource and scope, from its bytes: no step
for each span, and no look at a value.
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
_LONGER: Final = bytes(range(0x20)) + b'"\\'
"""Bytes that may take six in a row's JSON. Tags and lengths are among them, and make up for short values, whose texts are longer."""


def check(request: Parsed, size: int, limit: int) -> int:
    """How large the rows of a request of `size` bytes are, about, in bytes. Raises DataError where that is more than `limit`."""
    found = size + _copies(request)
    if found > limit:
        raise DataError(
            f"its rows would take about {found} bytes, more than AGL_MAX_EXPANDED_BYTES ({limit}): each has its whole resource and scope; "
            "send a smaller resource, or fewer items in a request"
        )
    return found


def size_of(request: Request) -> int:
    """The same of a request in the log, where one was not noted at receipt."""
    return request.expanded or len(request.raw) + _copies(MESSAGES[request.signal].FromString(request.raw))


def _copies(request: Parsed) -> int:
    if isinstance(request, ExportTraceServiceRequest):
        found = 0
        for group in request.resource_spans:
            shared = _text(group.resource.SerializeToString())
            for part in group.scope_spans:
                found += len(part.spans) * (shared + len(part.scope.name) + len(part.scope.version))
        return found
    if isinstance(request, ExportLogsServiceRequest):
        found = 0
        for logs in request.resource_logs:
            shared = _text(logs.resource.SerializeToString()) + len(logs.schema_url)
            for part in logs.scope_logs:
                found += len(part.log_records) * (shared + _text(part.scope.SerializeToString()) + len(part.schema_url))
        return found
    found = 0
    for metrics in request.resource_metrics:
        shared = _text(metrics.resource.SerializeToString()) + len(metrics.schema_url)
        for part in metrics.scope_metrics:
            own = shared + _text(part.scope.SerializeToString()) + len(part.schema_url)
            for metric in part.metrics:
                kind = metric.WhichOneof("data")
                points = len(getattr(metric, kind).data_points) if kind is not None else 0
                found += points * (own + len(metric.name) + len(metric.description) + len(metric.unit))
    return found


def _text(data: bytes) -> int:
    return len(data) + 5 * (len(data) - len(data.translate(None, _LONGER)))
