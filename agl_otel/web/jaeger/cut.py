"""Truncate oversized spans: gRPC clients accept messages of 4 MiB, and a span with an image or a long document is larger.

Without this, Jaeger would show an error instead of the trace. A tag marks truncated spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from agl_otel_hook import conventions

MESSAGE_BYTES: Final = 3 << 20
"""Limit on a message, with a margin to the 4 MiB of gRPC clients."""
LENGTHS: Final = tuple(1 << power for power in range(19, 5, -1))
"""Text lengths tried in turn until the message fits: 512 KiB, 256 KiB, … 64 bytes."""
MANY: Final = 100  # events, links and attributes that a span keeps if truncating texts does not suffice
MARK: Final = "… (cut)"


def fitted(data: TracesData) -> TracesData:
    """Truncate `data` in place until it fits into MESSAGE_BYTES, set SHOWN_CUT on each truncated span, and return it."""
    if (size := data.ByteSize()) <= MESSAGE_BYTES:
        return data
    spans = [span for group in data.resource_spans for scope in group.scope_spans for span in scope.spans]
    before = [span.ByteSize() for span in spans]
    for length in LENGTHS:
        for group in data.resource_spans:
            for value in _values(group.resource.attributes):
                _cut(value, length)
        for span in spans:
            _cut_span(span, length)
        if data.ByteSize() <= MESSAGE_BYTES:
            break
    else:
        for span in spans:
            _drop(span)
    for span, was in zip(spans, before, strict=True):
        if span.ByteSize() < was:
            note = f"this span has {was} bytes, and long texts in it are cut: its attributes are whole in otel_traces, by SQL"
            span.attributes.add(key=conventions.SHOWN_CUT, value=AnyValue(string_value=note))
    if not any(span.ByteSize() != was for span, was in zip(spans, before, strict=True)) and spans:
        note = f"this message had {size} bytes, and long texts of its resource are cut"
        spans[0].attributes.add(key=conventions.SHOWN_CUT, value=AnyValue(string_value=note))
    return data


def _cut_span(span: Span, length: int) -> None:
    for value in _values(span.attributes):
        _cut(value, length)
    for event in span.events:
        for value in _values(event.attributes):
            _cut(value, length)
    if len(span.status.message) > length:
        span.status.message = span.status.message[:length] + MARK


def _values(attributes: object) -> Iterator[AnyValue]:
    pairs: list[KeyValue] = list(attributes)  # pyright: ignore[reportArgumentType]  # protobuf's container type is private
    return (pair.value for pair in pairs)


def _cut(value: AnyValue, length: int) -> None:
    kind = value.WhichOneof("value")
    if kind == "string_value" and len(value.string_value) > length + len(MARK):
        value.string_value = value.string_value[:length] + MARK
    elif kind == "bytes_value" and len(value.bytes_value) > length:
        value.bytes_value = value.bytes_value[:length]
    elif kind == "array_value":
        if value.array_value.ByteSize() > length:
            del value.array_value.values[max(1, length // 16) :]
        for each in value.array_value.values:
            _cut(each, length)
    elif kind == "kvlist_value":
        for each in _values(value.kvlist_value.values):
            _cut(each, length)


def _drop(span: Span) -> None:
    """Keep the first MANY events, links and attributes."""
    del span.events[MANY:]
    del span.links[MANY:]
    del span.attributes[MANY:]
