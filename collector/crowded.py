"""Refuses a request of very many next to empty parts: a span costs the collector what it costs, however few bytes it takes. Pure.

A kilobyte of gzip can unfold to a million empty spans, which would hold everybody else's up for minutes. Real ones have ids at least.
"""

from __future__ import annotations

from typing import Final

from agl_otel.errors import DataError
from agl_otel_hook.varint import read_varint

MAX_PARTS: Final = 65_536
"""Resources, scopes, and spans, log records or metrics of one request."""
FEW_PARTS: Final = 1024
LEAST_BYTES: Final = 16
"""Of a part, on average, where there are more than a few."""
LEAST_JSON_BYTES: Final = 8
"""Of a JSON object, likewise: `{"intValue":"1"}` has twice as many."""
_LEVELS: Final = (1, 2, 2)
"""The numbers of the fields that hold parts, in a request, a resource, a scope: the same for each signal."""


def check(raw: bytes) -> None:
    """Raise DataError where a request in protobuf is too crowded; what cannot be read is left to its reader."""
    if len(raw) > FEW_PARTS * LEAST_BYTES:
        parts = _count(raw)
        if parts > MAX_PARTS or parts * LEAST_BYTES > len(raw):
            many = f"more than {MAX_PARTS}" if parts > MAX_PARTS else str(parts)
            raise DataError(f"it has {many} resources, scopes and items in {len(raw)} bytes: send smaller batches")


def check_json(body: bytes) -> None:
    """The same of a request in JSON."""
    objects = body.count(b"{")
    if objects > FEW_PARTS and objects * LEAST_JSON_BYTES > len(body):
        raise DataError(f"it has {objects} objects in {len(body)} bytes: send smaller batches")


def _count(raw: bytes) -> int:
    """How many messages there are on these levels; MAX_PARTS + 1 where there are more than that."""
    found = 0
    todo = [(0, len(raw), 0)]
    while todo:
        at, end, level = todo.pop()
        tag = _LEVELS[level] << 3 | 2
        while at < end:
            kind, at = read_varint(raw, at)
            if kind & 7 == 2:
                size, at = read_varint(raw, at)
                if kind == tag:
                    found += 1
                    if found > MAX_PARTS:
                        return found
                    if level + 1 < len(_LEVELS):
                        todo.append((at, min(at + size, end), level + 1))
                at += size
            elif kind & 7 == 0:
                at = read_varint(raw, at)[1]
            elif kind & 7 in (1, 5):
                at += 8 if kind & 7 == 1 else 4
            else:
                break
    return found
