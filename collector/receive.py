"""What both ways of OTLP share: what takes requests, and our errors as google.rpc.Status. The transports are grpc_port and http_port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agl_otel.collector.intake import Intake
from agl_otel.collector.signals import Protocol
from agl_otel.collector.write import Writer
from agl_otel.errors import AglError, grpc_status

MAX_MESSAGE_BYTES: Final = 64 << 20
RETRY_SECONDS: Final = 1  # what we tell clients to wait
METRICS_OFF: Final = "this collector takes no metrics (AGL_METRICS is false): set OTEL_METRICS_EXPORTER=none, or send them elsewhere"
GRPC_NUMBER: Final = {code.name: code.value[0] for code in grpc.StatusCode}


@dataclass(frozen=True)
class Receiver:
    """What a transport needs to take requests."""

    intake: Intake
    writer: Writer
    token: str = ""
    metrics: bool = True
    """Whether metrics are taken."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """After decompression."""

    def takes(self, protocol: Protocol) -> bool:
        """Whether this signal is switched on."""
        return self.metrics or protocol.signal != "metrics"


def status_of(error: AglError) -> Status:
    """The google.rpc.Status of an error, with RetryInfo where the same request may succeed later."""
    status = Status(code=GRPC_NUMBER[grpc_status(error)], message=str(error))
    if error.retryable:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    return status
