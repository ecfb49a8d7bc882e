"""Spans that fit into a message of gRPC: clients take 4 MiB, and a span with a picture or a book in it is larger.

Its long texts are cut, and a tag says so: a viewer that shows the rest is better than one that shows an error for the whole trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from agl_otel_hook import conventions

MESSAGE_BYTES: Final = 3 << 20
"""What a message may take: gRPC's clients take 4 MiB."""
LENGTHS: Final = tuple(1 << power for power in range(19, 5, -1))
"""How long a text may be, tried one after the other: 512 KiB, half of it … 64 bytes."""
MANY: Final = 100  # entries of a list, attributes, events that stay at the worst
MARK: Final = "… (cut)"


def fitted(data: TracesData) -> TracesData:
    """`data` itself where it fits, else with what is longest in it cut, and SHOWN_CUT on each of its spans that were."""
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
            told = f"this span has {was} bytes, and long texts in it are cut: its attributes are whole in otel_traces, by SQL"
            span.attributes.add(key=conventions.SHOWN_CUT, value=AnyValue(string_value=told))
    if not any(span.ByteSize() != was for span, was in zip(spans, before, strict=True)) and spans:
        told = f"this message had {size} bytes, and long texts of its resource are cut"
        spans[0].attributes.add(key=conventions.SHOWN_CUT, value=AnyValue(string_value=told))
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
    pairs: list[KeyValue] = list(attributes)  # pyright: ignore[reportArgumentType]  # a container of protobuf's
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
    """Many short things."""
    del span.events[MANY:]
    del span.links[MANY:]
    del span.attributes[MANY:]
