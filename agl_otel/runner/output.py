"""What an agent's process printed: kept within a bound, and handed to the collector as OTLP logs with the attempt's ids.

The first half of the bound and the last half are kept, because the start says what ran and the end says why it failed; a note says
how much was cut between them. Terminal escapes are data: they are stored as they are and interpreted by nobody here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import grpc
import grpc.aio
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from agl_otel.errors import from_grpc
from agl_otel.net.tls import aio_channel
from agl_otel_hook import conventions

Stream = Literal["stdout", "stderr"]
KEEP_BYTES: Final = 256 * 1024  # of each stream of an attempt
RECORD_BYTES: Final = 32 * 1024  # one log record at most: viewers show records whole
REQUEST_BYTES: Final = 2 * 1024 * 1024  # one export; gRPC's default bound on messages is 4 MiB


class Capture:
    """The bytes of one stream, the first and the last half of `keep_bytes`, and when the first of them came."""

    def __init__(self, stream: Stream, keep_bytes: int = KEEP_BYTES) -> None:
        self.stream: Stream = stream
        self.total_bytes = 0
        self.started_unix_nano = 0
        self._half = keep_bytes // 2
        self._stored = 0
        self._since = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what was just printed."""
        now = time.time_ns()
        if not self.total_bytes:
            self.started_unix_nano = now
        self._since = self._since or now
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= self._half:
                self._tail_bytes -= len(self._tail.popleft())

    @property
    def cut_bytes(self) -> int:
        """How many bytes were left out between the head and the tail."""
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._half)

    def pending(self, *, final: bool) -> Pending:
        """What is not stored yet: whole lines of the head; where `final`, all the rest."""
        end = len(self._head) if final else max(self._stored, self._head.rfind(b"\n") + 1)
        text = self._head[self._stored : end].decode(errors="replace")
        if final and self._tail:
            text += self._note() + b"".join(self._tail)[-self._half :].decode(errors="replace")
        return Pending(self, self._since or self.started_unix_nano, text, end)

    def stored(self, upto: int) -> None:
        """The head is stored up to here."""
        self._stored, self._since = upto, time.time_ns() if upto < len(self._head) else 0

    def _note(self) -> str:
        return f"\n[… {self.cut_bytes} of {self.total_bytes} bytes cut …]\n" if self.cut_bytes else ""

    def text(self) -> str:
        """What was kept, with a note where something was cut; bytes that are no UTF-8 become U+FFFD."""
        tail = b"".join(self._tail)[-self._half :] if self._tail else b""
        if not self.cut_bytes:
            return (bytes(self._head) + tail).decode(errors="replace")
        return self._head.decode(errors="replace") + self._note() + tail.decode(errors="replace")

    def last_lines(self, count: int = 10, characters: int = 2000) -> str:
        """The last `count` lines that are not empty, at most `characters` of them."""
        lines = [line.rstrip() for line in self.text().splitlines() if line.strip()]
        return "\n".join(lines[-count:])[-characters:]


@dataclass(frozen=True, slots=True)
class Pending:
    """Text of a stream that is to be stored."""

    capture: Capture
    since_unix_nano: int
    """When the first of it was printed."""
    text: str
    upto: int
    """How far into the head it goes."""


@dataclass(frozen=True, slots=True)
class Printed:
    """What one attempt printed."""

    rollout_id: str
    attempt_id: str
    traceparent: str
    """Of the attempt's root span: the records are shown with its trace."""
    captures: Sequence[Capture]
    final: bool = True
    """Whether the attempt has ended; before, only whole lines are sent, as far as the first half of what is kept."""


class LogExporter:
    """Sends what agents printed to the collector, many attempts in one export."""

    def __init__(self, collector_grpc: str, *, token: str = "", service_name: str = "agl-runner") -> None:
        self._channel = aio_channel(collector_grpc)
        self._stub = LogsServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._resource = Resource(attributes=[_text("service.name", service_name)])

    async def export(self, printed: Iterable[Printed], *, timeout_seconds: float = 10.0) -> int:
        """Export what is not stored yet; how many records the collector acked. Raises UnavailableError where it is away or full."""
        found = [(one, pending) for one in printed for pending in to_store(one)]
        records = [record for one, pending in found for record in to_records(one, pending)]
        for request in self._requests(records):
            try:
                await self._stub.Export(request, timeout=timeout_seconds, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                raise from_grpc(error.code().name, f"agents' output was not stored: {error.details()}") from error
        for _, pending in found:
            pending.capture.stored(pending.upto)
        return len(records)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    def _requests(self, records: Sequence[LogRecord]) -> Iterable[ExportLogsServiceRequest]:
        batch: list[LogRecord] = []
        size = 0
        for record in records:
            record_bytes = record.ByteSize()
            if batch and size + record_bytes > REQUEST_BYTES:
                yield self._request(batch)
                batch, size = [], 0
            batch.append(record)
            size += record_bytes
        if batch:
            yield self._request(batch)

    def _request(self, records: Sequence[LogRecord]) -> ExportLogsServiceRequest:
        scope = ScopeLogs(scope=InstrumentationScope(name="agl_otel.runner"), log_records=records)
        return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=self._resource, scope_logs=[scope])])


def to_store(printed: Printed) -> list[Pending]:
    """What is to be stored of each stream of an attempt."""
    return [pending for capture in printed.captures if (pending := capture.pending(final=printed.final)).text]


def to_records(printed: Printed, pending: Pending) -> list[LogRecord]:
    """Log records of one stream, in order: pieces of at most RECORD_BYTES, cut at line ends where there are any."""
    _, trace_id, span_id, flags = printed.traceparent.split("-")
    ids = [_text(conventions.ROLLOUT_ID, printed.rollout_id), _text(conventions.ATTEMPT_ID, printed.attempt_id)]
    stream = pending.capture.stream
    now = time.time_ns()
    return [
        LogRecord(
            time_unix_nano=pending.since_unix_nano + index,  # readers sort by time: pieces stay in order
            observed_time_unix_nano=now,
            severity_text="INFO" if stream == "stdout" else "WARN",
            severity_number=9 if stream == "stdout" else 13,  # pyright: ignore[reportArgumentType]  # the enum's values as ints
            body=AnyValue(string_value=piece),
            attributes=[*ids, _text(conventions.LOG_STREAM, stream)],
            trace_id=bytes.fromhex(trace_id),
            span_id=bytes.fromhex(span_id),
            flags=int(flags, 16),
        )
        for index, piece in enumerate(pieces(pending.text, RECORD_BYTES))
    ]


def pieces(text: str, limit: int) -> list[str]:
    """`text` in pieces of at most `limit` characters, each ending after a line end where it holds one."""
    cut: list[str] = []
    while len(text) > limit:
        end = text.rfind("\n", 0, limit) + 1 or limit
        cut.append(text[:end])
        text = text[end:]
    return [*cut, text] if text else cut


def _text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))
