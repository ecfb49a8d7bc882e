"""Spans as OTLP's bytes, written directly. Pure.

The SDK makes a protobuf object of every value and serialises the tree of them; for the few kinds of values that our own spans hold
(whole.py) that is most of what exporting costs. Equal to what the SDK writes, which a test compares.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from agl_otel_hook.arrays import PACKED_KEYS
from agl_otel_hook.varint import varint
from agl_otel_hook.writable import mended

_KINDS: Final = {kind: bytes([0x30, kind.value + 1]) for kind in SpanKind}
_IS_REMOTE_KNOWN: Final = 0x100
_IS_REMOTE: Final = 0x200


def of_parts(resource: bytes, scope: bytes, spans: bytes) -> bytes:
    """An ExportTraceServiceRequest from the two parts of `head_of` and spans one after the other as `field_of` writes them."""
    return b"\x0a" + _sized(resource + b"\x12" + _sized(scope + spans))


def field_of(span: bytes) -> bytes:
    """A Span message as a field of the ScopeSpans around it."""
    return b"\x12" + _sized(span)


def head_of(span: ReadableSpan) -> tuple[bytes, bytes]:
    """ResourceSpans and ScopeSpans without what they hold."""
    (whole,) = encode_spans([span]).resource_spans
    scope = ScopeSpans(scope=whole.scope_spans[0].scope, schema_url=whole.scope_spans[0].schema_url)
    whole.ClearField("scope_spans")
    return whole.SerializeToString(), scope.SerializeToString()


def span_bytes(span: ReadableSpan) -> bytes:
    """A Span message."""
    context, parent, status = span.get_span_context(), span.parent, span.status
    assert context is not None, "a span has ids"
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
    parts += (b"\x2a", _sized(_text(span.name)), _KINDS[span.kind])
    parts.append(struct.pack("<BQBQ", 0x39, span.start_time or 0, 0x41, span.end_time or 0))
    parts += _attributes(span.attributes or {})
    if status.status_code is not StatusCode.UNSET:
        code = bytes([0x18, status.status_code.value])
        parts += (b"\x7a", _sized((b"\x12" + _sized(_text(status.description)) if status.description else b"") + code))
    else:
        parts.append(b"\x7a\x00")
    parts.append(struct.pack("<HI", 0x0185, _IS_REMOTE_KNOWN | (_IS_REMOTE if parent is not None and parent.is_remote else 0)))
    return b"".join(parts)


def _attributes(attributes: Mapping[str, Any]) -> Iterable[bytes]:
    for key, value in attributes.items():
        encoded = b"\x2a" + _sized(value) if key in PACKED_KEYS and isinstance(value, bytes) else _value(value)
        if encoded is not None:
            name = _name(key)
            yield b"\x4a" + varint(len(name) + 1 + len(varint(len(encoded))) + len(encoded)) + name + b"\x12" + _sized(encoded)


@lru_cache(maxsize=1024)
def _name(key: str) -> bytes:
    return b"\x0a" + _sized(_text(key))


def _value(value: Any) -> bytes | None:
    """An AnyValue; None where OTLP has none for it."""
    encode = _VALUES.get(type(value))
    return encode(value) if encode is not None else None


def _int(value: int) -> bytes:
    return b"\x18" + varint(value & 0xFFFF_FFFF_FFFF_FFFF) if -(1 << 63) <= value < 1 << 63 else b"\x0a" + _sized(b"%d" % value)


def _list(values: Sequence[Any]) -> bytes | None:
    encoded = [_value(value) for value in values]
    return b"\x2a" + _sized(b"".join([b"\x0a" + _sized(value) for value in encoded if value is not None]))


_VALUES: Final[Mapping[type, Callable[[Any], bytes | None]]] = {
    str: lambda value: b"\x0a" + _sized(_text(value)),
    bool: lambda value: b"\x10\x01" if value else b"\x10\x00",
    int: _int,
    float: lambda value: b"\x21" + struct.pack("<d", value),
    bytes: lambda value: b"\x3a" + _sized(value),
    list: _list,
    tuple: _list,
}


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return mended(text).encode()


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data
