"""Removes from a request what cannot be parsed, so that the rest is kept: text that is not UTF-8, or values nested too deep. Pure.

Protobuf's parser rejects a whole message for one such value. A request that it rejects is therefore split on the wire: its spans (log
records, data points) are parsed one by one, each as if it were alone in the request. If a resource, scope or metric cannot be parsed,
everything below it is removed too, because it is unknown what it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector import crowded
from agl_otel.collector.journal import Signal
from agl_otel_hook.varint import read_varint, varint

UNREADABLE: Final = "it cannot be read: a text that is no UTF-8, or values nested too deep"
_LENGTH_DELIMITED: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""{wire type: bytes}."""
_Wrap = Callable[[bytes], bytes]


@dataclass(frozen=True)
class _Level:
    """A message type, by the fields that contain further levels; without any it is a span, log record or data point."""

    below: Mapping[int, _Level] = field(default_factory=dict[int, "_Level"])


_LEAF: Final = _Level()
_SPANS: Final = _Level({1: _Level({2: _Level({2: _LEAF})})})
_DATA: Final = _Level({1: _LEAF})
_POINTS: Final = _Level({1: _Level({2: _Level({2: _Level(dict.fromkeys((5, 7, 9, 10, 11), _DATA))})})})
_REQUESTS: Final[dict[Signal, tuple[type[Message], _Level]]] = {
    "traces": (ExportTraceServiceRequest, _SPANS),
    "logs": (ExportLogsServiceRequest, _SPANS),
    "metrics": (ExportMetricsServiceRequest, _POINTS),
}


def remove_unreadable(signal: Signal, raw: bytes) -> tuple[bytes, int]:
    """Return a request without what cannot be parsed, and the number of spans, records or points removed (at least one).

    Raises DecodeError if it is not a request at all, and DataError if it has too many parts to walk in Python, field by field.
    """
    message, level = _REQUESTS[signal]
    crowded.check_parts(signal, raw)

    def reads(data: bytes) -> bool:
        try:
            crowded.check_piece(signal, data)
            message.FromString(data)
        except DecodeError:
            return False
        return True

    fields = _fields(raw)
    if fields is None:
        raise DecodeError("its fields cannot be parsed")
    data, refused = _filter(level, fields, lambda data: data, reads)
    return data or b"", refused


def _filter(level: _Level, fields: list[tuple[int, int, bytes]], wrap: _Wrap, reads: Callable[[bytes], bool]) -> tuple[bytes | None, int]:
    """Return a message without what cannot be parsed (None: nothing is left), and the number of spans removed.

    `wrap` makes a request of the message's bytes.
    """
    own = b"".join(whole for number, _, whole in fields if number not in level.below)
    if not reads(wrap(own)):
        return None, max(1, sum(_count(level.below[number], whole[start:]) for number, start, whole in fields if number in level.below))
    parts = [own]
    refused = 0
    for number, start, whole in fields:
        if (below := level.below.get(number)) is None:
            continue
        if reads(wrap(whole)):
            parts.append(whole)
            continue
        inner = _fields(whole[start:]) if below.below else None
        if inner is None:
            refused += 1
            continue
        data, removed = _filter(below, inner, lambda data, number=number: wrap(_enclosed(number, data)), reads)
        refused += removed
        if data is not None:
            parts.append(_enclosed(number, data))
    return b"".join(parts), refused


def _count(level: _Level, data: bytes) -> int:
    """Count the spans in a message; 1 if they cannot be counted."""
    if not level.below:
        return 1
    fields = _fields(data)
    if fields is None:
        return 1
    return sum(_count(level.below[number], whole[start:]) for number, start, whole in fields if number in level.below)


def _enclosed(number: int, data: bytes) -> bytes:
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def _fields(data: bytes) -> list[tuple[int, int, bytes]] | None:
    """Return (number, start of the content, all bytes) of each field of a message; None if the fields cannot be parsed."""
    found: list[tuple[int, int, bytes]] = []
    at = 0
    while at < len(data):
        begin = at
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            content, at = at, read_varint(data, at)[1]
        elif kind == _LENGTH_DELIMITED:
            size, content = read_varint(data, at)
            at = content + size
        elif kind in _FIXED:
            content, at = at, at + _FIXED[kind]
        else:
            return None
        if not tag >> 3 or at > len(data):
            return None
        found.append((tag >> 3, content - begin, data[begin:at]))
    return found
