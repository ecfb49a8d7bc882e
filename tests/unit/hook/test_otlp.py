from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess, ExportTraceServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from agl_otel_hook import guard, otlp
from agl_otel_hook.otlp import LogExporter, SpanExporter
from tests.authority import Authority
from tests.otlp_receiver import OtlpReceiver

SPANS = [ReadableSpan("work", SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)), resource=Resource({"team": "blue"}))]
LOST, DONE = SpanExportResult.FAILURE, SpanExportResult.SUCCESS


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    monkeypatch.setattr(otlp, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(guard, "failures", guard.failures.copy())


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[BaseHTTPRequestHandler], None]], ThreadingHTTPServer]]:
    """Start an HTTP server that answers as it is told."""
    running: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return running[-1]

    yield start
    for each in running:
        each.shutdown()
        each.server_close()


def answer_with(body: bytes = b"", status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def export() -> SpanExportResult:
    exporter = SpanExporter()
    try:
        return exporter.export(SPANS)
    finally:
        exporter.shutdown()


def test_spans_arrive_with_their_resource(receiver: OtlpReceiver) -> None:
    assert export() is DONE
    (span,) = receiver.spans("work")
    assert (span.trace_id, span.span_id, span.resource["team"]) == (f"{1:032x}", f"{2:016x}", "blue")
    ((path, _, headers),) = receiver.bodies
    assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf") and "agl-otel-hook" in headers["user-agent"]


def test_log_records_arrive(receiver: OtlpReceiver) -> None:
    exporter: Any = LogExporter()
    provider = LoggerProvider(Resource({"team": "blue"}))
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider.get_logger("agent").emit(body={"said": ["a", 1]}, attributes={"n": 3})
    provider.shutdown()
    ((path, body, _),) = receiver.bodies
    (found,) = ExportLogsServiceRequest.FromString(body).resource_logs
    (record,) = found.scope_logs[0].log_records
    assert path == "/v1/logs" and found.resource.attributes[0].value.string_value == "blue"
    assert record.body.kvlist_value.values[0].key == "said" and record.attributes[0].value.int_value == 3


def test_the_signals_own_settings_come_first(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.http_url}/elsewhere?x=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=general")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20of%20traces,x-team=blue")
    assert export() is DONE
    ((path, _, headers),) = receiver.bodies
    assert (path, headers["authorization"], headers["x-team"]) == ("/elsewhere?x=1", "Bearer of traces", "blue")


def test_a_path_of_the_general_endpoint_is_kept(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{receiver.http_url}/otlp/")
    assert export() is DONE
    assert receiver.bodies[0][0] == "/otlp/v1/traces"


@pytest.mark.parametrize("compression", ["gzip", "deflate", "none", "unknown"])
def test_requests_are_compressed_as_configured(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    exporter = SpanExporter()
    assert exporter.encoding == {"gzip": "gzip", "deflate": "deflate"}.get(compression, "")
    if compression != "deflate":  # which the receiver does not read
        assert exporter.export(SPANS) is DONE and receiver.bodies[0][2].get("content-encoding", "") == exporter.encoding
        assert receiver.spans("work")
    exporter.shutdown()


def test_one_connection_serves_all_exports(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    running = server(lambda handler: (ports.append(handler.client_address[1]), answer_with()(handler)))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    exporter = SpanExporter()
    assert [exporter.export(SPANS) for _ in range(3)] == [DONE] * 3
    assert len(set(ports)) == 1
    exporter.shutdown()


def test_a_connection_that_the_server_has_closed_is_opened_again_at_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        answer_with()(handler)
        handler.close_connection = True  # without telling

    running = server(answer)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    monkeypatch.setattr(otlp, "FIRST_PAUSE_SECONDS", 1000.0)
    exporter = SpanExporter()
    assert [exporter.export(SPANS) for _ in range(3)] == [DONE] * 3
    exporter.shutdown()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_passing_refusal_is_tried_again(receiver: OtlpReceiver, status: int) -> None:
    receiver.statuses = [status, status]
    assert export() is DONE
    assert len(receiver.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 413, 500, 302])
def test_a_lasting_refusal_is_not(receiver: OtlpReceiver, status: int) -> None:
    receiver.statuses = [status]
    assert export() is LOST
    assert len(receiver.bodies) == 1


def test_a_server_that_is_down_is_tried_until_it_is_back(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(receiver.http_url.rpartition(":")[2])
    receiver.close()
    found: list[SpanExportResult] = []
    exporting = threading.Thread(target=lambda: found.append(export()))
    failed = guard.failures.total()
    exporting.start()
    while guard.failures.total() < failed + 3:
        time.sleep(0.001)
    again = OtlpReceiver(http_port=port)
    exporting.join()
    assert found == [DONE] and len(again.spans("work")) == 1
    again.close()


@pytest.mark.parametrize("after", ["seconds", "date"])
def test_it_waits_as_long_as_the_server_asks(server: Any, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    asked = "2" if after == "seconds" else formatdate(time.time() + 3, usegmt=True)
    running = server(answer_with(b"", 503, **{"retry-after": asked}))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    waits: list[float] = []

    def wait(_: SpanExporter, seconds: float) -> bool:
        waits.append(seconds)
        return True  # closed meanwhile

    monkeypatch.setattr(SpanExporter, "_wait", wait)
    assert export() is LOST and waits == []  # it would be longer than the timeout
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
    assert export() is LOST
    assert len(waits) == 1 and 1 < waits[0] <= 3


def test_the_timeout_bounds_all_tries_of_an_export(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.refuse = True
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    assert export() is LOST
    assert len(receiver.bodies) > 1


def test_a_server_that_does_not_answer_is_given_up(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.go.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    assert export() is LOST


def test_a_process_that_ends_tries_no_longer_than_it_has_left(receiver: OtlpReceiver) -> None:
    receiver.refuse = True
    exporter, found = SpanExporter(), list[SpanExportResult]()
    exporting = threading.Thread(target=lambda: found.append(exporter.export(SPANS)))
    exporting.start()
    while not receiver.bodies:
        time.sleep(0.001)
    otlp.end_within(0.0)
    exporting.join()
    tries = len(receiver.bodies)
    assert found == [LOST] and exporter.export(SPANS) is LOST and len(receiver.bodies) == tries
    otlp.end_within(math.inf)
    receiver.refuse = False
    assert exporter.export(SPANS) is DONE
    exporter.shutdown()


def test_a_shutdown_ends_the_tries(receiver: OtlpReceiver) -> None:
    receiver.refuse = True
    exporter, found = SpanExporter(), list[SpanExportResult]()
    exporting = threading.Thread(target=lambda: found.append(exporter.export(SPANS)))
    exporting.start()
    while not receiver.bodies:
        time.sleep(0.001)
    exporter.shutdown()
    exporting.join()
    assert found == [LOST] and exporter.export(SPANS) is LOST


def test_rejected_spans_are_counted_and_told(server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rejected = ExportTracePartialSuccess(rejected_spans=300, error_message="too old")
    running = server(answer_with(ExportTraceServiceResponse(partial_success=rejected).SerializeToString()))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    guard.failures.pop("the receiver", None)
    assert export() is DONE
    assert "300 rejected: too old" in caplog.text


@pytest.mark.parametrize("reply", [b"\x0a", b"\x0a\x7f", b"\xff" * 30, b"\x0a\x03\x08\x80\x80", b'{"ok": 1}'])
def test_a_reply_that_is_none_is_no_failure(server: Any, monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    running = server(answer_with(reply))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    assert export() is DONE


@pytest.mark.parametrize("client", [False, True])
def test_tls_with_a_private_authority(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, client: bool) -> None:
    authority = Authority(tmp_path)
    running = server(answer_with())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.path("ca.pem"))
    context.load_cert_chain(authority.path("server.pem"), authority.path("server.key"))
    context.verify_mode = ssl.CERT_REQUIRED if client else ssl.CERT_NONE
    running.socket = context.wrap_socket(running.socket, server_side=True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://localhost:{running.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    assert export() is LOST
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", authority.path("ca.pem"))
    if client:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", authority.path("client.pem"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", authority.path("client.key"))
    assert export() is DONE


def test_a_proxy_of_the_environment_is_used_but_for_what_it_excepts(
    server: Any, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    proxy = server(lambda handler: (asked.append(handler.path), answer_with()(handler)))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.example:4318")
    assert export() is DONE
    assert asked == ["http://collector.example:4318/v1/traces"]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    assert export() is DONE
    assert len(asked) == 1 and receiver.spans("work")


def test_keyword_headers_are_added(receiver: OtlpReceiver) -> None:
    exporter = SpanExporter(headers={"authorization": "Bearer key"})
    exporter.export(SPANS)
    exporter.shutdown()
    assert receiver.bodies[0][2]["authorization"] == "Bearer key"


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1:4318")
    with pytest.raises(ValueError, match="http:// or https://"):
        SpanExporter()


def test_a_fork_uses_a_connection_of_its_own(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    running = server(lambda handler: (ports.append(handler.client_address[1]), answer_with()(handler)))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    exporter = SpanExporter()
    exporter.export(SPANS)
    parents = exporter._connection  # pyright: ignore[reportPrivateUsage]  # to close it, as the parent would
    monkeypatch.setattr(otlp.os, "getpid", lambda: -1)
    exporter.export(SPANS)
    assert len(set(ports)) == 2 and parents is not None and parents.sock is not None
    exporter.shutdown()
    parents.close()
