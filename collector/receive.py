"""Shared by OTLP over gRPC (grpc_port) and over HTTP (http_port): what takes requests, and our errors as google.rpc.Status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agl_otel.collector.intake import Intake
from agl_otel.collector.refusals import Refusals
from agl_otel.collector.signals import Protocol
from agl_otel.collector.write import Writer
from agl_otel.errors import AglError, SwitchedOffError, grpc_status

MAX_MESSAGE_BYTES: Final = 64 << 20
RETRY_SECONDS: Final = 1  # the delay that responses ask clients for
GRPC_NUMBER: Final = {code.name: code.value[0] for code in grpc.StatusCode}


@dataclass(frozen=True)
class Receiver:
    """What a transport needs to take requests."""

    intake: Intake
    writer: Writer
    token: str = ""
    metrics: bool = True
    """Whether metrics are accepted."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Limit on a message after decompression."""
    refusals: Refusals = field(default_factory=Refusals)
    """Counts what the transports refuse."""

    def check(self, protocol: Protocol) -> None:
        """Raise SwitchedOffError if this signal is not accepted."""
        if protocol.signal == "metrics" and not self.metrics:
            raise SwitchedOffError(
                "this collector takes no metrics (AGL_METRICS is false): set OTEL_METRICS_EXPORTER=none, or send them elsewhere"
            )


def status_of(error: AglError) -> Status:
    """Return an error's google.rpc.Status, with RetryInfo if the same request may succeed later."""
    status = Status(code=GRPC_NUMBER[grpc_status(error)], message=str(error))
    if error.retryable:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    return status
