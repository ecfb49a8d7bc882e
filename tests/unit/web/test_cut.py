from __future__ import annotations

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from agl_otel.web.jaeger.cut import MANY, MESSAGE_BYTES, fitted
from agl_otel_hook import conventions


def message(span: Span) -> TracesData:
    data = TracesData()
    data.resource_spans.add().scope_spans.add().spans.append(span)
    return data


def the_span(data: TracesData) -> Span:
    return data.resource_spans[0].scope_spans[0].spans[0]


def test_a_message_that_fits_is_unchanged() -> None:
    data = message(Span(name="small", attributes=[KeyValue(key="a", value=AnyValue(string_value="x" * 1000))]))
    before = data.SerializeToString()
    assert fitted(data).SerializeToString() == before


def test_long_texts_lists_and_events_are_cut_until_they_fit() -> None:
    numbers = AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=n) for n in range(1_000_000)]))
    span = Span(name="large", attributes=[KeyValue(key="numbers", value=numbers), KeyValue(key="n", value=AnyValue(int_value=7))])
    span.events.add(name="e").attributes.add(key="text", value=AnyValue(string_value="y" * 5_000_000))
    found = fitted(message(span))
    assert found.ByteSize() <= MESSAGE_BYTES
    kept = {each.key: each.value for each in the_span(found).attributes}
    assert kept["n"].int_value == 7 and 0 < len(kept["numbers"].array_value.values) < 1_000_000 and conventions.SHOWN_CUT in kept


def test_very_many_short_attributes_are_cut_to_the_first() -> None:
    span = Span(name="many", attributes=[KeyValue(key=f"key {n}", value=AnyValue(string_value="z" * 40)) for n in range(80_000)])
    found = the_span(fitted(message(span)))
    assert len(found.attributes) == MANY + 1 and found.attributes[-1].key == conventions.SHOWN_CUT


def test_a_large_resource_is_cut_too() -> None:
    data = message(Span(name="small"))
    data.resource_spans[0].resource.attributes.add(key="process.command_line", value=AnyValue(string_value="x" * 5_000_000))
    found = fitted(data)
    assert found.ByteSize() <= MESSAGE_BYTES and the_span(found).attributes[0].key == conventions.SHOWN_CUT
