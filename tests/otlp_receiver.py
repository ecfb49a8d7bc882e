"""A real OTLP receiver in the test's process, gRPC and HTTP: what a collector would have got, as plain Python values."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel_hook import conventions


@dataclass
class Received:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: bool
    start: int
    end: int
    events: list[tuple[str, dict[str, Any]]]
    """(name, attributes)."""

    @property
    def key(self) -> tuple[Any, Any]:
        return self.attributes.get(conventions.ROLLOUT_ID), self.attributes.get(conventions.ATTEMPT_ID)

    @property
    def marker(self) -> Any:
        return self.attributes.get(conventions.PROCESS)


@dataclass
class OtlpReceiver(TraceServiceServicer):
    """Collects what is exported to `grpc_address` (host:port) or `http_url`.

    `refuse` makes it answer UNAVAILABLE, `status` another HTTP status; without `go` set it answers nobody.
    """

    refuse: bool = False
    status: int = 200
    statuses: list[int] = field(default_factory=list[int])
    """Of the next answers over HTTP, before `status`."""
    http_port: int = 0
    exports: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    bodies: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list[tuple[str, bytes, dict[str, str]]])
    """What came over HTTP: (path, body, headers with lower-case names), refused or not."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    _spans: list[Received] = field(default_factory=list[Received])

    def __post_init__(self) -> None:
        self.go.set()
        self._changed = threading.Condition()
        self._grpc = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
        add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc_address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", self.http_port), self._handler())
        self.http_url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.go.set()
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802  # gRPC's name
        self.go.wait(300)
        if self.refuse:
            context.abort(grpc.StatusCode.UNAVAILABLE, "told to refuse")
        self.metadata = {pair[0]: pair[1] for pair in context.invocation_metadata()}
        self.take(request)
        return ExportTraceServiceResponse()

    def spans(self, name: str | None = None) -> list[Received]:
        with self._changed:
            return [span for span in self._spans if name is None or span.name == name]

    def ours(self) -> list[Received]:
        """Every span but seals and attempt spans."""
        return [span for span in self.spans() if span.name not in (conventions.SPAN_SEAL, conventions.SPAN_ATTEMPT)]

    def seals(self) -> dict[str, tuple[int, int]]:
        """{marker: (spans, dropped)} of the largest seal; announcements count nothing."""
        found: dict[str, tuple[int, int]] = {}
        for seal in self.spans(conventions.SPAN_SEAL):
            if conventions.SEAL_SPANS not in seal.attributes:
                continue
            numbers = seal.attributes[conventions.SEAL_SPANS], seal.attributes[conventions.SEAL_DROPPED]
            found[seal.marker] = max(numbers, found.get(seal.marker, (0, 0)))
        return found

    def wait_until(self, condition: Callable[[Sequence[Received]], bool], timeout_seconds: float = 300.0) -> None:
        with self._changed:
            met = self._changed.wait_for(lambda: condition(self._spans), timeout_seconds)
        assert met, f"not received in time; there are {[span.name for span in self._spans]}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        with self._changed:
            self.exports += 1
            for resource_spans in request.resource_spans:
                resource = _attributes(resource_spans.resource.attributes)
                for scope in resource_spans.scope_spans:
                    for s in scope.spans:
                        ids = s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex()
                        times = s.start_time_unix_nano, s.end_time_unix_nano
                        events = [(event.name, _attributes(event.attributes)) for event in s.events]
                        self._spans.append(Received(s.name, *ids, _attributes(s.attributes), resource, s.status.code == 2, *times, events))
            self._changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # http.server's name
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.bodies.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
                receiver.go.wait(300)
                status = 503 if receiver.refuse else receiver.statuses.pop(0) if receiver.statuses else receiver.status
                if self.path == "/v1/traces" and status == 200:
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
                pass

        return Handler


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
