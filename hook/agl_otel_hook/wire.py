"""Encode spans directly as OTLP bytes; the only encoder of our own spans. Pure.

The SDK makes a protobuf object of every value and serialises their tree, which is most of the cost of exporting our spans. The bytes decode
to the same messages as those of the SDK's exporter (a test compares them), except that unpaired surrogates become U+FFFD, and integers of
more than 64 bits text. For a span of the SDK use `encode` or `span_bytes`, for any other kind of span `message`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from agl_otel_hook import conventions
from agl_otel_hook.arrays import PACKED_KEYS, int_value
from agl_otel_hook.varint import varint
from agl_otel_hook.well_formed import mended

_FIRST: Final = b"\x0a"
"""Tag of field 1: the entries of requests, resources and mappings."""
_OF_SPAN, _OF_SCOPE, _OF_EVENT, _OF_LINK = b"\x4a", b"\x1a", b"\x1a", b"\x22"
"""Tags of attributes."""
_IS_REMOTE_KNOWN: Final = 0x100
_IS_REMOTE: Final = 0x200
_SHORT: Final = 64
"""The longest name and text of an attribute that is cached, in characters."""
_NO_STATUS: Final = b"\x7a\x00"


# --- requests -----------------------------------------------------------------------------------------------------


class BareSpan(ReadableSpan):
    """An ended span without events, links and trace state; its encoding is cached."""

    _wire: bytes | None = None

    def wire_bytes(self) -> bytes:
        """Return the span as `of_parts` takes it."""
        if self._wire is None:
            self._wire = field_of(span_bytes(self, bare=True))
        return self._wire


def encode(spans: Iterable[ReadableSpan]) -> bytes:
    """Return an ExportTraceServiceRequest of the spans, grouped by resource and scope."""
    groups: dict[int, tuple[Resource, dict[InstrumentationScope | None, list[bytes]]]] = {}
    for span in spans:
        _, scopes = groups.setdefault(id(span.resource), (span.resource, {}))  # by id(): the hash of a resource is that of its JSON
        scopes.setdefault(span.instrumentation_scope, []).append(
            span.wire_bytes() if isinstance(span, BareSpan) else field_of(span_bytes(span))
        )
    return b"".join([_resource_spans(*group) for group in groups.values()])


def _resource_spans(resource: Resource, scopes: Mapping[InstrumentationScope | None, Sequence[bytes]]) -> bytes:
    parts = [_field(b"\x12", _scope_head_of(scope) + b"".join(fields)) for scope, fields in scopes.items()]
    return _field(_FIRST, resource_head(resource.attributes, resource.schema_url) + b"".join(parts))


def of_parts(resource: bytes, scope: bytes, spans: bytes) -> bytes:
    """Return an ExportTraceServiceRequest (or TracesData) of one resource and scope; a concatenation of several is their union.

    Args:
        resource: as from `resource_head`.
        scope: as from `scope_head`.
        spans: concatenated, each as from `field_of`.
    """
    return _field(_FIRST, resource + _field(b"\x12", scope + spans))


def head_of(span: ReadableSpan) -> tuple[bytes, bytes]:
    """Return the resource and scope of an SDK span, for `of_parts`."""
    return resource_head(span.resource.attributes, span.resource.schema_url), _scope_head_of(span.instrumentation_scope)


def resource_head(attributes: Mapping[str, Any], schema_url: str = "") -> bytes:
    """Return a ResourceSpans message without its spans."""
    return _field(_FIRST, b"".join(_attributes(_FIRST, attributes))) + _optional(b"\x1a", schema_url)


def scope_head(name: str, version: str = "", attributes: Mapping[str, Any] | None = None, schema_url: str = "") -> bytes:
    """Return a ScopeSpans message without its spans."""
    scope = [_optional(b"\x0a", name), _optional(b"\x12", version), *_attributes(_OF_SCOPE, attributes or {})]
    return _field(b"\x0a", b"".join(scope)) + _optional(b"\x1a", schema_url)


def _scope_head_of(scope: InstrumentationScope | None) -> bytes:
    if scope is None:
        return scope_head("")
    return scope_head(scope.name, scope.version or "", scope.attributes, scope.schema_url or "")


def field_of(span: bytes) -> bytes:
    """Return a Span message as a field of its ScopeSpans."""
    return b"\x12" + _sized(span)


# --- spans --------------------------------------------------------------------------------------------------------


def span_bytes(span: ReadableSpan, *, bare: bool = False) -> bytes:
    """Return a Span message; packed arrays (arrays.py) of a model call become OTLP arrays.

    `bare` skips events, links, trace state and the counts of dropped items, to save time: spans of the proxy have none.
    """
    context, parent, status = span.get_span_context(), span.parent, span.status
    assert context is not None, "a span has ids"
    return message(
        context.trace_id.to_bytes(16, "big"),
        context.span_id.to_bytes(8, "big"),
        parent.span_id.to_bytes(8, "big") if parent is not None else b"",
        span.name,
        span.kind.value + 1,
        span.start_time or 0,
        span.end_time or 0,
        span.attributes or {},
        () if bare else (*_events(span), *_links(span), *_dropped(span)),
        (status.status_code.value, status.description or ""),
        "" if bare else state_text(context.trace_state),
        _IS_REMOTE_KNOWN if parent is None or not parent.is_remote else _IS_REMOTE_KNOWN | _IS_REMOTE,
    )


def message(
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes,
    name: str,
    kind: int,
    start_time: int,
    end_time: int,
    attributes: Mapping[str, Any],
    rest: Iterable[bytes] = (),
    status: tuple[int, str] = (0, ""),
    trace_state: str = "",
    flags: int = 0,
) -> bytes:
    """Return a Span message.

    Args:
        parent_id: empty for a root span.
        kind: OTLP's SpanKind; 0 is unspecified.
        start_time: in Unix nanoseconds, like `end_time`.
        attributes: str, int, float, bool, bytes, None, and sequences and mappings of these; other values are left out.
        rest: events and links, as from `event_field` and `link_field`.
        status: OTLP's status code and a description.
    """
    parts = [b"\x0a\x10", trace_id, b"\x12\x08", span_id]
    if trace_state:
        parts.append(_field(b"\x1a", _text(trace_state)))
    if parent_id:
        parts += (b"\x22\x08", parent_id)
    parts += (b"\x2a", _sized(_text(name)), b"\x30" + varint(kind), struct.pack("<BQBQ", 0x39, start_time, 0x41, end_time))
    parts += _attributes(_OF_SPAN, attributes, packed=name == conventions.SPAN_LLM)
    parts += rest
    code, description = status
    parts.append(_field(b"\x7a", _optional(b"\x12", description) + b"\x18" + varint(code)) if code or description else _NO_STATUS)
    if flags:
        parts.append(struct.pack("<HI", 0x0185, flags))
    return b"".join(parts)


def event_field(name: str, time: int, attributes: Mapping[str, Any] | None, dropped: int = 0) -> bytes:
    """Return an event as a field of its span; `time` in Unix nanoseconds."""
    parts = [struct.pack("<BQ", 0x09, time), _optional(b"\x12", name), *_attributes(_OF_EVENT, attributes or {}), _count(b"\x20", dropped)]
    return _field(b"\x5a", b"".join(parts))


def link_field(
    trace_id: bytes, span_id: bytes, attributes: Mapping[str, Any] | None, *, trace_state: str = "", dropped: int = 0, flags: int = 0
) -> bytes:
    """Return a link as a field of its span."""
    parts = [b"\x0a\x10", trace_id, b"\x12\x08", span_id, _optional(b"\x1a", trace_state), *_attributes(_OF_LINK, attributes or {})]
    parts += (_count(b"\x28", dropped), struct.pack("<BI", 0x35, flags) if flags else b"")
    return _field(b"\x6a", b"".join(parts))


def state_text(state: Mapping[str, str]) -> str:
    """Return a trace state in the W3C form, as OTLP has it."""
    return ",".join(f"{key}={value}" for key, value in state.items())


def _events(span: ReadableSpan) -> Iterable[bytes]:
    return (event_field(event.name, event.timestamp, event.attributes, event.dropped_attributes) for event in span.events)


def _links(span: ReadableSpan) -> Iterable[bytes]:
    for link in span.links:
        ids = link.context.trace_id.to_bytes(16, "big"), link.context.span_id.to_bytes(8, "big")
        flags = _IS_REMOTE_KNOWN | (_IS_REMOTE if link.context.is_remote else 0)
        yield link_field(*ids, link.attributes, dropped=link.dropped_attributes, flags=flags)


def _dropped(span: ReadableSpan) -> tuple[bytes, bytes, bytes]:
    return _count(b"\x50", span.dropped_attributes), _count(b"\x60", span.dropped_events), _count(b"\x70", span.dropped_links)


# --- attributes ---------------------------------------------------------------------------------------------------


def _attributes(tag: bytes, attributes: Mapping[str, Any], *, packed: bool = False) -> Iterable[bytes]:
    for key, value in attributes.items():
        kind = type(value)
        if (kind is int or (kind is str and len(value) <= _SHORT)) and len(key) <= _SHORT:
            yield _short_attribute(tag, key, value)
            continue
        encoded = b"\x2a" + _sized(value) if packed and key in PACKED_KEYS and kind is bytes else _value(value)
        if encoded is not None:
            yield _attribute(tag, key, encoded)


def _attribute(tag: bytes, key: str, encoded: bytes) -> bytes:
    name, size = _name(key) if len(key) <= _SHORT else _name_field(key), varint(len(encoded))
    return b"".join((tag, varint(len(name) + 1 + len(size) + len(encoded)), name, b"\x12", size, encoded))


@lru_cache(maxsize=4096)
def _short_attribute(tag: bytes, key: str, value: int | str) -> bytes:
    """Return an attribute; most spans of a process have the same ids, names and small numbers."""
    return _attribute(tag, key, _VALUES[type(value)](value))


def _name_field(key: str) -> bytes:
    return b"\x0a" + _sized(_text(key))


_name: Final = lru_cache(maxsize=1024)(_name_field)


def _value(value: Any) -> bytes | None:
    """Return an AnyValue; None where OTLP has no type for `value`."""
    encode = _VALUES.get(type(value))
    return encode(value) if encode is not None else _of_subclass(value)


def _of_subclass(value: Any) -> bytes | None:
    for kind in (str, int, float, bytes):
        if isinstance(value, kind):
            return _VALUES[kind](value)
    if isinstance(value, Sequence):
        return _list(cast("Sequence[Any]", value))
    return _mapping(cast("Mapping[Any, Any]", value)) if isinstance(value, Mapping) else None


def _list(values: Sequence[Any]) -> bytes:
    if set(map(type, values)) == {int} and (min(values) < -(1 << 63) or max(values) >= 1 << 63):
        values = [*map(str, values)]  # stays a list of one type
    encoded = [_value(value) for value in values]
    return b"\x2a" + _sized(b"".join([b"\x0a" + _sized(value) for value in encoded if value is not None]))


def _mapping(values: Mapping[Any, Any]) -> bytes:
    return b"\x32" + _sized(b"".join(_attributes(_FIRST, {str(key): value for key, value in values.items()})))


_VALUES: Final[Mapping[type, Callable[[Any], bytes]]] = {
    str: lambda value: b"\x0a" + _sized(_text(value)),
    bool: lambda value: b"\x10\x01" if value else b"\x10\x00",
    int: int_value,
    float: lambda value: b"\x21" + struct.pack("<d", value),
    bytes: lambda value: b"\x3a" + _sized(value),
    list: _list,
    tuple: _list,
    dict: _mapping,
    type(None): lambda _: b"",
}


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return mended(text).encode()


def _optional(tag: bytes, text: str) -> bytes:
    return _field(tag, _text(text)) if text else b""


def _count(tag: bytes, number: int) -> bytes:
    return tag + varint(number) if number else b""


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + varint(len(data)) + data


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data
