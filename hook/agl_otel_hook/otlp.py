"""Exporters of spans and log records: OTLP over HTTP with the standard library alone.

The SDK's exporters bring protobuf and, older ones, requests, whose versions frameworks bound. These bring nothing. They are configured by
the variables OTEL_EXPORTER_OTLP_* as OpenTelemetry defines them, and keep one connection. OTEL_EXPORTER_OTLP_TIMEOUT bounds all tries of
one export; without it they go on for RETRY_SECONDS, each for CALL_SECONDS.
"""

from __future__ import annotations

import math
import os
import random
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import export as sdk
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.util.re import parse_env_headers

from agl_otel_hook import conventions
from agl_otel_hook.guard import note_failure
from agl_otel_hook.varint import read_varint
from agl_otel_hook.wire import encode, encode_logs

CALL_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 60.0  # longer than a collector takes to restart and replay its log
FIRST_PAUSE_SECONDS: float = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
RETRYABLE: Final = frozenset({429, 502, 503, 504})
"""Statuses of OTLP's specification after which a request is sent again."""
MAX_REPLY_BYTES: Final = 1 << 20
DEFAULT_ENDPOINT: Final = "http://localhost:4318"
WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
"""{compression: zlib's name of its format}."""
_HEADERS: Final = {"content-type": "application/x-protobuf", "user-agent": "agl-otel-hook"}
_jitter: Final = random.SystemRandom()  # not `random`: an agent that seeds it draws the same numbers with and without the hook
_ends_at = math.inf


def end_within(seconds: float) -> None:
    """Let no export of this process go on for longer than that from now on, because it ends; with math.inf it goes on after all."""
    global _ends_at
    _ends_at = time.monotonic() + seconds


class _TryError(Exception):
    """A failed try."""

    def __init__(self, why: str, *, again: bool, wait_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.again = again
        """Whether a retry may succeed."""
        self.wait_seconds = wait_seconds
        """How long the server asks to wait."""


class HttpExporter:
    """Sends requests of one signal. For one thread at a time; a fork opens a connection of its own."""

    def __init__(self, signal: Literal["traces", "logs"], headers: Mapping[str, str] | None = None) -> None:
        """`headers` are sent besides the environment's. Raises ValueError for an endpoint that is no URL, OSError for bad certificates."""

        def setting(name: str) -> str:
            return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

        own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
        instead = os.environ.get(conventions.ENV_OTLP_HTTP) if setting("PROTOCOL") == "grpc" else None
        self.url = own or f"{(instead or setting('ENDPOINT') or DEFAULT_ENDPOINT).rstrip('/')}/v1/{signal}"
        self.encoding = setting("COMPRESSION") if setting("COMPRESSION") in WINDOW_BITS else ""
        self._headers = {**_HEADERS, **parse_env_headers(setting("HEADERS"), liberal=True), **(headers or {})}
        if self.encoding:
            self._headers["content-encoding"] = self.encoding
        timeout = float(setting("TIMEOUT") or 0)
        self._seconds = timeout or RETRY_SECONDS
        self._call_seconds = timeout or CALL_SECONDS
        self._connect, self._target = _way_to(self.url, setting)
        self._abandoned: list[HTTPConnection | None] = []
        self._connection: HTTPConnection | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin in this process: a fork never closes its parent's connection, which would write to it."""
        self._abandoned.append(self._connection)
        self._connection = None
        self._closed = threading.Event()
        self._pid = os.getpid()

    def send(self, request: bytes) -> bool:
        """Send a serialised request, and again after failures that may pass. Return whether it was acknowledged."""
        if self._pid != os.getpid():
            self._begin()
        if self.encoding:
            deflate = zlib.compressobj(wbits=WINDOW_BITS[self.encoding])
            request = deflate.compress(request) + deflate.flush()
        began = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        while not self._closed.is_set() and (left := min(began + self._seconds, _ends_at) - time.monotonic()) > 0:
            try:
                reply = self._post(request, min(self._call_seconds, left))
            except _TryError as error:
                note_failure(f"export to {self.url}", str(error))
                wait = max(pause * _jitter.uniform(0.5, 1.0), error.wait_seconds)
                if not error.again or time.monotonic() + wait >= min(began + self._seconds, _ends_at) or self._wait(wait):
                    return False
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                count, why = rejected(reply)
                if count or why:
                    note_failure("the receiver", f"{count} rejected: {why}")
                return True
        return False

    def shutdown(self) -> None:
        """Stop trying, and close the connection."""
        self._closed.set()
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: nothing is buffered here."""
        return True

    def _wait(self, seconds: float) -> bool:
        """Wait; return whether the exporter was shut down meanwhile."""
        return self._closed.wait(seconds)

    def _post(self, request: bytes, seconds: float) -> bytes:
        """Return the body of the answer. Raises _TryError."""
        is_new = self._connection is None
        try:
            try:
                answer = self._ask(request, seconds)
            except (ConnectionError, HTTPException):
                if is_new:
                    raise
                self._drop()  # the server had closed it while it was idle
                answer = self._ask(request, seconds)
            reply = answer.read(MAX_REPLY_BYTES)
        except (OSError, HTTPException) as error:
            self._drop()
            raise _TryError(f"{type(error).__name__}: {error}", again=True) from error
        if not answer.isclosed():
            self._drop()
        if not 200 <= answer.status < 300:
            asked = _seconds_of(answer.headers.get("retry-after", ""))
            raise _TryError(f"{answer.status} {answer.reason}", again=answer.status in RETRYABLE, wait_seconds=asked)
        return reply

    def _ask(self, request: bytes, seconds: float) -> HTTPResponse:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        connection.request("POST", self._target, request, self._headers)
        return connection.getresponse()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class SpanExporter(HttpExporter, sdk.SpanExporter):
    """Exporter of spans, for the SDK."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__("traces", headers)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans (OpenTelemetry calls this)."""
        return SpanExportResult.SUCCESS if self.send(encode(spans)) else SpanExportResult.FAILURE


class LogExporter(HttpExporter):
    """Exporter of log records, for the SDK: of all its versions, whose base class has had several names."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__("logs", headers)

    def export(self, batch: Sequence[Any]) -> SpanExportResult:
        """Send the records (OpenTelemetry calls this, and ignores the result)."""
        return SpanExportResult.SUCCESS if self.send(encode_logs(batch)) else SpanExportResult.FAILURE


def _way_to(url: str, setting: Callable[[str], str]) -> tuple[Callable[[], HTTPConnection], str]:
    """Return how to connect to an endpoint, if need be through the proxy that the environment names, and the target of requests."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an OTLP endpoint begins with http:// or https://, not {url!r}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    proxy = _proxy_of(parts)
    context = _trust(setting) if parts.scheme == "https" else None
    host, port = parts.hostname, parts.port

    def connect() -> HTTPConnection:
        first_host, first_port = (proxy.hostname or "", proxy.port or 80) if proxy is not None else (host, port)
        if context is None:
            return HTTPConnection(first_host, first_port)
        connection = HTTPSConnection(first_host, first_port, context=context)
        if proxy is not None:
            connection.set_tunnel(host, port or 443)
        return connection

    return connect, url if proxy is not None and context is None else path


def _trust(setting: Callable[[str], str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=setting("CERTIFICATE") or None)
    if certificate := setting("CLIENT_CERTIFICATE"):
        context.load_cert_chain(certificate, setting("CLIENT_KEY") or None)
    return context


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    if not any(name.lower() == f"{parts.scheme}_proxy" for name in os.environ):
        return None
    from urllib.request import getproxies, proxy_bypass  # 10 ms, wasted without a proxy

    proxy = getproxies().get(parts.scheme)
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy and not proxy_bypass(parts.netloc) else None


def _seconds_of(retry_after: str) -> float:
    """Return the seconds of a Retry-After header; 0 where it has none."""
    if retry_after.isdecimal():
        return float(retry_after)
    date = parsedate_tz(retry_after)
    return max(mktime_tz(date) - time.time(), 0.0) if date is not None else 0.0


def rejected(reply: bytes) -> tuple[int, str]:
    """Return how many spans or records a reply has rejected, and why; (0, "") where it has accepted all."""
    partial = next((value for tag, value in _fields(reply) if tag == 0x0A and isinstance(value, bytes)), b"")
    fields = dict(_fields(partial))
    count, why = fields.get(0x08, 0), fields.get(0x12, b"")
    return (count, why.decode(errors="replace")) if isinstance(count, int) and isinstance(why, bytes) else (0, "")


def _fields(message: bytes) -> Generator[tuple[int, int | bytes]]:
    """Yield (tag, value) of a protobuf message's first fields, those that are varints or have a length."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        if tag & 7 not in (0, 2):
            return
        value, at = read_varint(message, at)
        if at > len(message) or (tag & 7 == 2 and at + value > len(message)):
            return
        yield tag, value if tag & 7 == 0 else message[at : at + value]
        at += value if tag & 7 == 2 else 0
