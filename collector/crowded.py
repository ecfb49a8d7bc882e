"""Refuse requests of very many nearly empty parts: each part has a fixed cost in the collector, however few bytes it takes. Pure.

A kilobyte of gzip can expand to a million empty spans, which would delay all other requests for minutes. Real spans have at least ids.
The Go collector has the same bounds (internal/wire/crowded.go).
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from agl_otel.collector import merged
from agl_otel.collector.journal import Signal
from agl_otel.errors import CrowdedError
from agl_otel_hook.varint import read_varint

MAX_PARTS: Final = 65_536
"""Limit on resources, scopes, spans, log records, metrics and data points of one request."""
FEW_PARTS: Final = 1024
LEAST_BYTES: Final = 16
"""Least average size of a part, for requests above FEW_PARTS."""
MAX_OTHERS: Final = 4 * MAX_PARTS
"""Limit on other fields of the messages that contain parts: a scope has two, a metric four."""
MAX_MESSAGES: Final = 1 << 21
"""Limit on attributes, events, links, exemplars and other messages, without values in lists; an attribute counts as two."""
LEAST_MESSAGE_BYTES: Final = 4
"""Least average size of a message: an attribute with a one-letter key has nine bytes."""
MAX_VALUES: Final = 1 << 23
"""Limit on values in lists (token ids, log-probs)."""
LEAST_JSON_BYTES: Final = 8
"""Least average size of a JSON object: `{"intValue":"1"}` has twice as many bytes."""
_Level = tuple[frozenset[int], bool]
"""Tags of the fields to descend into, and whether they are parts."""


def _level(*fields: int, parts: bool = True) -> _Level:
    return frozenset(number << 3 | 2 for number in fields), parts


_ITEMS: Final = (_level(1), _level(2), _level(2))
_KINDS: Final = _level(*(field.number for field in Metric.DESCRIPTOR.oneofs_by_name["data"].fields), parts=False)
_LEVELS: Final[dict[Signal, tuple[_Level, ...]]] = {"traces": _ITEMS, "logs": _ITEMS, "metrics": (*_ITEMS, _KINDS, _level(1))}


def check(signal: Signal, raw: bytes) -> int:
    """Return the approximate number of messages in a protobuf request; 0 for a small request.

    Raises CrowdedError if it is too crowded, DecodeError if it cannot be parsed.
    """
    if len(raw) <= FEW_PARTS * LEAST_BYTES:
        return 0
    found = merged.messages(signal, raw)
    if _may_have_too_many_parts(found, len(raw)):
        check_parts(signal, raw)
    return _bounded(signal, raw, found, min(MAX_MESSAGES, len(raw) // LEAST_MESSAGE_BYTES))


def check_counts(size: int, parts: int, others: int, messages: int, values: int) -> None:
    """Raise CrowdedError if a request of `size` bytes is too crowded: its parts, other fields beside them, messages and values in lists."""
    if size <= FEW_PARTS * LEAST_BYTES:
        return
    if parts > MAX_PARTS or parts * LEAST_BYTES > size:
        raise _too_many_parts(parts, size)
    if others > MAX_OTHERS and _may_have_too_many_parts(messages + values, size):
        raise _too_many_others(size)
    most = min(MAX_MESSAGES, size // LEAST_MESSAGE_BYTES)
    if messages > most:
        raise _too_many_messages(most, size)
    if values > MAX_VALUES:
        raise _too_many_values()


def _may_have_too_many_parts(messages: int, size: int) -> bool:
    """Return whether parts must be counted one by one, which bounds the fields beside them; unknown fields alone cost little."""
    return messages > MAX_PARTS - merged.UNSURE or messages * LEAST_BYTES > size


def check_piece(signal: Signal, raw: bytes) -> None:
    """Raise CrowdedError if a piece of a request costs too much to parse, DecodeError if it cannot be parsed."""
    _bounded(signal, raw, merged.messages(signal, raw), MAX_MESSAGES)


def check_parts(signal: Signal, raw: bytes) -> None:
    """Raise CrowdedError if a request has too many parts, or too many other fields beside them. Unparsable bytes are left to the parser."""
    if len(raw) <= FEW_PARTS * LEAST_BYTES:
        return
    parts = _parts(signal, raw)
    if parts > MAX_PARTS or parts * LEAST_BYTES > len(raw):
        raise _too_many_parts(parts, len(raw))


def _bounded(signal: Signal, raw: bytes, found: int, most: int) -> int:
    """Return `found`, the number of messages. Raises CrowdedError for more than `most` outside lists, or for too many values in lists."""
    if found > most + MAX_VALUES:  # one of the two limits is exceeded: a second count to tell which is not worth its cost
        raise CrowdedError(f"it has {found} attributes, events, points, values and the like in {len(raw)} bytes: send smaller batches")
    outside = merged.messages(signal, raw, lists=False) if found > most else found
    if outside > most:
        raise _too_many_messages(most, len(raw))
    if found - outside > MAX_VALUES:
        raise _too_many_values()
    return found


def _too_many_parts(parts: int, size: int) -> CrowdedError:
    if parts > MAX_PARTS:
        return CrowdedError(f"it has more than {MAX_PARTS} resources, scopes and items in {size} bytes: send smaller batches")
    rule = f"a request with more than {FEW_PARTS} needs {LEAST_BYTES} bytes for each"
    return CrowdedError(f"it has {parts} resources, scopes and items in {size} bytes; {rule}: send smaller batches")


def _too_many_others(size: int) -> CrowdedError:
    return CrowdedError(f"it has more than {MAX_OTHERS} fields beside its items in {size} bytes: send smaller batches")


def _too_many_messages(most: int, size: int) -> CrowdedError:
    return CrowdedError(f"it has more than {most} attributes, events, points and the like in {size} bytes: send smaller batches")


def _too_many_values() -> CrowdedError:
    return CrowdedError(f"it has more than {MAX_VALUES} values in lists: send smaller batches")


def check_json(body: bytes) -> None:
    """Raise CrowdedError if a JSON request is too crowded; its protobuf form is checked again."""
    objects = body.count(b"{")
    if objects > FEW_PARTS and objects * LEAST_JSON_BYTES > len(body):
        rule = f"a request with more than {FEW_PARTS} needs {LEAST_JSON_BYTES} bytes for each"
        raise CrowdedError(f"it has {objects} objects in {len(body)} bytes; {rule}: send smaller batches")


def _parts(signal: Signal, raw: bytes) -> int:
    """Count the parts, up to MAX_PARTS + 1."""
    levels = _LEVELS[signal]
    found = others = 0
    todo = [(0, len(raw), 0)]
    while todo:
        at, end, level = todo.pop()
        tags, parts = levels[level]
        below = level + 1 < len(levels)
        while at < end:
            kind, at = read_varint(raw, at)
            inside = kind in tags
            if inside and parts:
                found += 1
                if found > MAX_PARTS:
                    return found
            else:
                others += 1
                if others > MAX_OTHERS:
                    raise _too_many_others(len(raw))
            if kind & 7 == 2:
                size, at = read_varint(raw, at)
                if inside and below:
                    todo.append((at, min(at + size, end), level + 1))
                at += size
            elif kind & 7 == 0:
                at = read_varint(raw, at)[1]
            elif kind & 7 in (1, 5):
                at += 8 if kind & 7 == 1 else 4
            else:
                break
    return found
