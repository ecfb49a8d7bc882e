"""Capture the output of agents' processes, bounded in size, and export it to the collector as OTLP logs with the attempt's ids.

Output beyond the bound is cut in the middle, with a note of how much: its start shows what ran, its end why it failed. Terminal
escapes are stored unchanged and not interpreted.
"""

from __future__ import annotations

import re
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
    """Keeps the first and the last `keep_bytes / 2` bytes of one stream."""

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
        """Append data that was just read."""
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
        """Number of bytes cut between the head and the tail."""
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._half)

    def pending(self, *, final: bool) -> Pending:
        """Return the text that is not stored yet: whole lines of the head, or with `final` everything."""
        end = len(self._head) if final else max(self._stored, self._head.rfind(b"\n") + 1)
        text = self._head[self._stored : end].decode(errors="replace")
        if final and self._tail:
            text += self._cut_note() + b"".join(self._tail)[-self._half :].decode(errors="replace")
        return Pending(self, self._since or self.started_unix_nano, text, end)

    def stored(self, upto: int) -> None:
        """Record that the head is stored up to this offset."""
        self._stored, self._since = upto, time.time_ns() if upto < len(self._head) else 0

    def _cut_note(self) -> str:
        return f"\n[… {self.cut_bytes} of {self.total_bytes} bytes cut …]\n" if self.cut_bytes else ""

    def text(self) -> str:
        """Return the kept output, with a note where it was cut. Invalid UTF-8 becomes U+FFFD."""
        tail = b"".join(self._tail)[-self._half :] if self._tail else b""
        if not self.cut_bytes:
            return (bytes(self._head) + tail).decode(errors="replace")
        return self._head.decode(errors="replace") + self._cut_note() + tail.decode(errors="replace")

    def last_lines(self, count: int = 10, characters: int = 2000) -> str:
        """Return the last `count` lines that are not empty, at most `characters` characters."""
        lines = [line.rstrip() for line in self.text().splitlines() if line.strip()]
        return "\n".join(lines[-count:])[-characters:]

    def error_lines(self, count: int = 10, characters: int = 2000) -> str:
        """Return why a process failed: the exception of its last traceback, and then the traceback; `last_lines` where there is none.

        What OpenTelemetry's exporters log is left out.
        """
        lines = _without_exporter([line.rstrip() for line in self.text().splitlines() if line.strip()])
        start = next((place for place in range(len(lines) - 1, -1, -1) if lines[place].startswith(_TRACEBACK)), None)
        if start is None:
            return "\n".join(lines[-count:])[-characters:]
        end = next((place for place in range(start + 1, len(lines)) if not lines[place].startswith(" ")), len(lines))
        return "\n".join([*lines[end:][:count], *lines[start:end][-count:]])[:characters]


_TRACEBACK: Final = "Traceback (most recent call last)"
_CHAINED: Final = ("During handling of the above", "The above exception was")
_EXPORTER: Final = re.compile(r"Failed to export \w+ (batch|to)\b|Exception while exporting ")


def _is_exporters(line: str) -> bool:
    """Whether OpenTelemetry's exporters log it; looks at each character a few times, for an agent may print a line of any length."""
    return " encountered while exporting" in line.partition("Transient error ")[2] or _EXPORTER.search(line) is not None


def _without_exporter(lines: Iterable[str]) -> list[str]:
    """Leave out what OpenTelemetry's exporters log, with the tracebacks below it."""
    kept: list[str] = []
    expects: str | tuple[str, ...] = ""  # how a line begins that belongs to what was left out before it
    for line in lines:
        if _is_exporters(line):
            expects = _TRACEBACK
        elif expects and line.startswith(expects):
            expects = " " if line.startswith(_TRACEBACK) else _TRACEBACK if line.startswith(_CHAINED) else expects
        elif expects == " ":  # the line that ends a traceback is the exception
            expects = _CHAINED
        else:
            expects = ""
            kept.append(line)
    return kept


@dataclass(frozen=True, slots=True)
class Pending:
    """Text of a stream that is not stored yet."""

    capture: Capture
    since_unix_nano: int
    """When its first byte was read."""
    text: str
    upto: int
    """Its end, as an offset into the head."""


@dataclass(frozen=True, slots=True)
class AttemptOutput:
    """The output of one attempt."""

    rollout_id: str
    attempt_id: str
    traceparent: str
    """Of the attempt's root span, which links the log records to its trace."""
    captures: Sequence[Capture]
    final: bool = True
    """Whether the attempt has ended; before, only whole lines of the head are sent."""


class LogExporter:
    """Sends the output of agents to the collector, many attempts in one export."""

    def __init__(self, collector_grpc: str, *, token: str = "", service_name: str = "agl-runner") -> None:
        self._channel = aio_channel(collector_grpc)
        self._stub = LogsServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._resource = Resource(attributes=[_text("service.name", service_name)])

    async def export(self, outputs: Iterable[AttemptOutput], *, timeout_seconds: float = 10.0) -> int:
        """Export output that is not stored yet; return the number of acknowledged records.

        Raises UnavailableError where the collector is unreachable or full.
        """
        found = [(output, pending) for output in outputs for pending in pending_output(output)]
        records = [record for output, pending in found for record in to_records(output, pending)]
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


def pending_output(output: AttemptOutput) -> list[Pending]:
    """Return the text of each stream of an attempt that is not stored yet."""
    return [pending for capture in output.captures if (pending := capture.pending(final=output.final)).text]


def to_records(output: AttemptOutput, pending: Pending) -> list[LogRecord]:
    """Convert pending text to log records, in order: pieces of at most RECORD_BYTES, split at line ends where possible."""
    _, trace_id, span_id, flags = output.traceparent.split("-")
    ids = [_text(conventions.ROLLOUT_ID, output.rollout_id), _text(conventions.ATTEMPT_ID, output.attempt_id)]
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
    """Split `text` into pieces of at most `limit` characters, after line ends where possible."""
    cut: list[str] = []
    while len(text) > limit:
        end = text.rfind("\n", 0, limit) + 1 or limit
        cut.append(text[:end])
        text = text[end:]
    return [*cut, text] if text else cut


def _text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))
