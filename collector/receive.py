"""What both ways of OTLP share: who may come in, and our errors as google.rpc.Status. The transports are grpc_port and http_port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agl_otel.bearer import bearer_refusal
from agl_otel.collector.intake import Intake, Outcome
from agl_otel.collector.journal import Signal
from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel.collector.write import Writer
from agl_otel.errors import AglError, grpc_status
from agl_otel.ingest import TRUSTED, Sender, sender_of

MAX_MESSAGE_BYTES: Final = 64 << 20
RETRY_SECONDS: Final = 1  # what we tell clients to wait
UNAUTHENTICATED: Final = "this collector wants the header `Authorization: Bearer TOKEN` (AGL_TOKEN)"
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

    def refusal(self, authorization: str, *scopes: str, sending: bool = False) -> str | None:
        """Why a client that sends this Authorization header may not come in; with `sending` an agents' key is enough.

        Tokens for the collector, or for one of `scopes`, are taken, too.
        """
        if not self.token or (sending and self._sender(authorization).is_agent):
            return None
        why = bearer_refusal(authorization, self.token, "collector", *scopes)
        return why if why is None else why or UNAUTHENTICATED

    async def take(self, signal: Signal, raw: bytes, metadata: Mapping[str, str]) -> Outcome:
        """Accept a request of a client that may come in; see Intake.take."""
        return await self.intake.take(signal, raw, metadata, self._sender(metadata.get("authorization", "")))

    def _sender(self, authorization: str) -> Sender:
        """Who shows this Authorization header."""
        return sender_of(self.token, authorization.removeprefix("Bearer ")) if authorization.startswith("Bearer ") else TRUSTED


def status_of(error: AglError) -> Status:
    """The google.rpc.Status of an error, with RetryInfo where the same request may succeed later."""
    status = Status(code=GRPC_NUMBER[grpc_status(error)], message=str(error))
    if error.retryable:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    return status


__all__ = ["GRPC_NUMBER", "MAX_MESSAGE_BYTES", "METRICS_OFF", "PROTOCOLS", "RETRY_SECONDS", "UNAUTHENTICATED", "Receiver", "status_of"]
