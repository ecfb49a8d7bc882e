"""The three signals of OTLP as a table: their paths, methods and messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from agl_otel.collector.journal import Signal
from agl_otel.collector.resends import Outcome


@dataclass(frozen=True)
class Protocol:
    """The protocol of one signal."""

    signal: Signal
    path: str
    """Path of OTLP over HTTP."""
    method: str
    """Method of OTLP over gRPC."""
    request: type[Message]
    response: type[Any]
    rejected: str
    """The partial success field that counts rejected items."""

    def answer(self, outcome: Outcome) -> Message:
        """Build the OTLP response to a request that was accepted, in whole or in part."""
        response = self.response()
        if outcome.rejected:
            setattr(response.partial_success, self.rejected, outcome.rejected)
            response.partial_success.error_message = outcome.message
        return response


_PACKAGE: Final = "/opentelemetry.proto.collector"
PROTOCOLS: Final = (
    Protocol(
        "traces",
        "/v1/traces",
        f"{_PACKAGE}.trace.v1.TraceService/Export",
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
        "rejected_spans",
    ),
    Protocol(
        "logs",
        "/v1/logs",
        f"{_PACKAGE}.logs.v1.LogsService/Export",
        ExportLogsServiceRequest,
        ExportLogsServiceResponse,
        "rejected_log_records",
    ),
    Protocol(
        "metrics",
        "/v1/metrics",
        f"{_PACKAGE}.metrics.v1.MetricsService/Export",
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
        "rejected_data_points",
    ),
)
