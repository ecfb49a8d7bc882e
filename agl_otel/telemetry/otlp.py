"""OTLP over gRPC for the package's own processes: the hook's encoder, a bearer token, and retries while a collector restarts.

Unlike the SDK's exporter it encodes a batch only once for all tries, and opens its channel at the first export.

A fork exports over HTTP: gRPC does not work in a fork made while the parent's threads were calling it, as a runner's always are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agl_otel.net import tls
from agl_otel.service.retry import Backoff, Tries
from agl_otel_hook.guard import note_failure
from agl_otel_hook.wire import encode

PATH: Final = "/v1/traces"
METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
CALL_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 60.0  # longer than a collector takes to restart and replay its log
BACKOFF: Final = Backoff(0.05, 2.0)
RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes of OTLP's specification after which a request is sent again; over HTTP:"""
RETRYABLE_STATUSES: Final = frozenset({429, 502, 503, 504})
MAX_REPLY_BYTES: Final = 1 << 20
_pid: Final = os.getpid()  # the process that loaded gRPC, not a fork


class _ExportError(Exception):
    """A failed try; `again`: a retry may succeed."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


class OtlpExporter(SpanExporter):
    """Exports to `endpoint` (host:port, or https://host:port; see net/tls.py). For one thread at a time.

    `http` (http://host:port or https://host:port) is the same collector's HTTP port, for forks; without it they try gRPC.
    """

    def __init__(self, endpoint: str, token: str = "", http: str = "", *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._endpoint = endpoint
        self._http = http if os.getpid() != _pid else ""
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._retry_seconds = retry_seconds
        self._closed = threading.Event()
        self._channel: grpc.Channel | None = None
        self._call: Callable[..., bytes] | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans; retry for RETRY_SECONDS after errors that may pass."""
        return SpanExportResult.SUCCESS if self.send(encode(spans)) else SpanExportResult.FAILURE

    def send(self, request: bytes) -> bool:
        """Send a serialised request in the same way; return whether it was acknowledged."""
        tries = Tries(BACKOFF, seconds=self._retry_seconds)
        while not self._closed.is_set():
            try:
                reply = self._post(request) if self._http else self._ask(request)
            except _ExportError as error:
                note_failure(f"export to {self._http or self._endpoint}", str(error))
                if not error.again or (pause := tries.pause()) is None:
                    return False
                self._closed.wait(pause)
                continue
            rejected = ExportTraceServiceResponse.FromString(reply).partial_success if reply else None
            if rejected is not None and rejected.rejected_spans:
                note_failure("the collector", f"{rejected.rejected_spans} spans rejected: {rejected.error_message}")
            return True
        return False

    def shutdown(self) -> None:
        """Stop retrying and close the channel."""
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing: there is no buffer."""
        return True

    def _ask(self, request: bytes) -> bytes:
        try:
            return self._stub()(request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]  # a failed call is also a grpc.Call
            raise _ExportError(f"{code}: {error.details()}", again=code in RETRYABLE) from error  # pyright: ignore[reportAttributeAccessIssue]  # as above

    def _post(self, request: bytes) -> bytes:
        trust, host = tls.ambient(), tls.target(self._http)
        secure = trust.uses_tls(self._http)
        connection = (
            HTTPSConnection(host, timeout=CALL_SECONDS, context=trust.context()) if secure else HTTPConnection(host, timeout=CALL_SECONDS)
        )
        try:
            connection.request("POST", PATH, request, {"content-type": "application/x-protobuf", **dict(self._metadata)})
            answer = connection.getresponse()
            reply = answer.read(MAX_REPLY_BYTES)
        except (OSError, HTTPException) as error:
            raise _ExportError(f"{type(error).__name__}: {error}", again=True) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise _ExportError(f"{answer.status} {answer.reason}", again=answer.status in RETRYABLE_STATUSES)
        return reply

    def _stub(self) -> Callable[..., bytes]:
        call = self._call
        if call is None:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_reconnect_backoff_ms", int(BACKOFF.longest_seconds * 1000))]
            self._channel = tls.channel(self._endpoint, options)
            call = self._call = self._channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        return call
