from __future__ import annotations

import enum
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from agl_otel_hook import conventions, wire
from agl_otel_hook.arrays import pack_ints
from agl_otel_hook.context import Key
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.whole import WholeSpan, WholeSpans
from agl_otel_hook.writable import writable

RESOURCE = Resource({"service.name": "proxy"}, "https://schema")
SCALARS: Any = st.text() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.binary(max_size=300)
LISTS = st.lists(st.text(max_size=3)) | st.lists(st.integers(-9, 9)).map(tuple)
TIMES = st.integers(0, (1 << 64) - 1)


class _Text(str):
    __slots__ = ()


class _Number(enum.IntEnum):
    ONE = 1


def context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


IDS = st.tuples(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1))
SPANS = st.builds(
    lambda ids, parent, remote, name, attributes, kind, status, times: WholeSpan(
        name,
        context(*ids),
        context(ids[0], parent, remote=remote) if parent else None,
        RESOURCE,
        attributes,
        kind=kind,
        status=status,
        start_time=times[0],
        end_time=times[1],
        instrumentation_scope=InstrumentationScope("scope", "1", "https://other"),
    ),
    IDS,
    st.none() | st.integers(1, (1 << 64) - 1),
    st.booleans(),
    st.text(),
    st.dictionaries(st.text(), SCALARS | LISTS),
    st.sampled_from(SpanKind),
    st.sampled_from([Status(StatusCode.UNSET), Status(StatusCode.OK), Status(StatusCode.ERROR), Status(StatusCode.ERROR, "why")]),
    st.tuples(TIMES, TIMES),
)


HALVES: Any = st.text(st.characters(codec=None))  # including unpaired surrogates
BIG: Any = st.integers(-(1 << 70), 1 << 70)
STATUSES = [Status(StatusCode.UNSET), Status(StatusCode.OK), Status(StatusCode.ERROR), Status(StatusCode.ERROR, "why")]
RESOURCES = [RESOURCE, Resource({"list": [1, 2], "flag": True}), Resource({})]
SCOPES = [None, InstrumentationScope(""), InstrumentationScope("s", "1", "https://s", {"k": 1.5})]


def sdk_spans(texts: Any, others: Any, limit: int | None) -> Any:
    """Strategy for SDK spans with these texts and other scalars, whose attributes are limited to `limit`."""
    values = st.recursive(
        texts | others | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.binary(max_size=300),
        lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )
    attributes = st.dictionaries(st.text(min_size=1), values, max_size=4)
    return st.builds(
        lambda ids, state, parent, name, resource, scope, held, events, links, kind, status, times: ReadableSpan(
            name,
            SpanContext(ids[0], ids[1], False, TraceFlags(1), state),
            parent,
            resource,
            BoundedAttributes(limit, held, immutable=False),
            [Event(name, BoundedAttributes(limit, held), at) for name, held, at in events],
            [Link(context(*ids, remote=remote), BoundedAttributes(limit, held)) for ids, remote, held in links],
            kind,
            status=status,
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=scope,
        ),
        IDS,
        st.sampled_from([None, TraceState([("a", "b"), ("c", "d")])]),
        st.none() | st.builds(lambda ids, remote: context(*ids, remote=remote), IDS, st.booleans()),
        texts,
        st.sampled_from(RESOURCES),
        st.sampled_from(SCOPES),
        attributes,
        st.lists(st.tuples(texts, attributes, TIMES), max_size=2),
        st.lists(st.tuples(IDS, st.booleans(), attributes), max_size=2),
        st.sampled_from(SpanKind),
        st.sampled_from(STATUSES),
        st.tuples(st.none() | TIMES, st.none() | TIMES),
    )


@given(st.lists(SPANS, min_size=1, max_size=3))
def test_whole_spans_are_encoded_as_the_sdk_encodes_them(spans: list[WholeSpan]) -> None:
    assert ExportTraceServiceRequest.FromString(wire.encode(spans)) == encode_spans(spans)


@given(st.lists(sdk_spans(st.text(), st.none(), 2), min_size=1, max_size=4))
def test_sdk_spans_are_encoded_as_the_sdk_encodes_them(spans: list[ReadableSpan]) -> None:
    assert ExportTraceServiceRequest.FromString(wire.encode(spans)) == encode_spans(spans)


@given(st.lists(sdk_spans(HALVES, BIG, None), min_size=1, max_size=4))
def test_unencodable_texts_and_numbers_are_encoded_as_writable_replaces_them(spans: list[ReadableSpan]) -> None:
    assert ExportTraceServiceRequest.FromString(wire.encode(spans)) == encode_spans([*map(writable, spans)])


LOGS = st.builds(
    lambda ids, texts, numbers, body, attributes, resource, scope: ReadableLogRecord(
        LogRecord(
            timestamp=numbers[0],
            observed_timestamp=numbers[1],
            context=set_span_in_context(NonRecordingSpan(context(*ids)), Context()) if ids is not None else Context(),
            severity_number=numbers[2],
            severity_text=texts[0],
            body=body,
            attributes=BoundedAttributes(2, attributes),
            event_name=texts[1],
        ),
        resource,
        scope,
    ),
    st.none() | IDS,
    st.tuples(st.none() | st.text(), st.none() | st.text()),
    st.tuples(st.none() | TIMES, st.none() | TIMES, st.sampled_from([None, SeverityNumber.UNSPECIFIED, SeverityNumber.WARN])),
    st.none() | SCALARS | LISTS | st.dictionaries(st.text(), SCALARS, max_size=3),
    st.dictionaries(st.text(min_size=1), SCALARS | LISTS, max_size=4),
    st.sampled_from(RESOURCES),
    st.sampled_from(SCOPES),
)


@given(st.lists(LOGS, min_size=1, max_size=4))
def test_log_records_are_encoded_as_the_sdk_encodes_them(records: list[ReadableLogRecord]) -> None:
    assert ExportLogsServiceRequest.FromString(wire.encode_logs(records)) == encode_logs(records)


def test_non_finite_numbers_and_subclasses_of_scalars_are_encoded() -> None:
    values: dict[str, Any] = {"nan": math.nan, "inf": [math.inf, -math.inf], "text": _Text("t"), "number": _Number.ONE}
    span = ReadableSpan("n", context(1, 2), None, RESOURCE, values)
    (ours,) = ExportTraceServiceRequest.FromString(wire.encode([span])).resource_spans[0].scope_spans[0].spans
    (sdks,) = encode_spans([span]).resource_spans[0].scope_spans[0].spans
    assert ours.SerializeToString(deterministic=True) == sdks.SerializeToString(deterministic=True)
    assert math.isnan(ours.attributes[0].value.double_value) and len(ours.attributes) == 4


def test_unsupported_values_are_left_out_or_encoded_as_text() -> None:
    attributes: dict[str, Any] = {"huge": 1 << 64, "object": object(), "half": "\ud83d", "kept": 1}
    span = WholeSpan("n", context(1, 2), resource=RESOURCE, attributes=attributes, instrumentation_scope=InstrumentationScope("s"))
    (written,) = ExportTraceServiceRequest.FromString(wire.encode([span])).resource_spans[0].scope_spans[0].spans
    assert {each.key: each.value.string_value or each.value.int_value for each in written.attributes} == {
        "huge": "18446744073709551616",
        "half": "\N{REPLACEMENT CHARACTER}",
        "kept": 1,
    }


def test_packed_ids_become_an_array_in_a_request_with_sdk_spans() -> None:
    exported: list[ReadableSpan] = []
    idle: list[Key] = []
    ledger = Ledger()
    spans = WholeSpans("scope", RESOURCE, ledger, export=exported.append, on_idle=idle.append)
    parent = context(7, 8, remote=True)
    begun = spans.begin(("ro", "at"), parent)
    assert (begun.context.trace_id, begun.parent) == (7, parent) and not ledger.is_idle(("ro", "at"))
    spans.end(
        begun, spans.made(begun, conventions.SPAN_LLM, SpanKind.CLIENT, {conventions.LLM_PROMPT_TOKEN_IDS: pack_ints([1, 300])}, 1, 2)
    )
    other = spans.begin(None, None)
    spans.end(other, spans.made(other, "other", SpanKind.CLIENT, {}, 1, 2, "failed"))
    assert wire.head_of(exported[0]) == spans.head()
    count = ledger.count(("ro", "at"))
    assert idle == [("ro", "at")] and count is not None and (count.spans, count.marker) == (1, begun.marker)
    theirs = ReadableSpan("sdk", context(1, 2), resource=RESOURCE, instrumentation_scope=InstrumentationScope("theirs"))
    request = ExportTraceServiceRequest.FromString(wire.encode([*exported, theirs]))
    first, failed, sdk = (span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
    held = {each.key: each.value for each in first.attributes}
    assert [value.int_value for value in held[conventions.LLM_PROMPT_TOKEN_IDS].array_value.values] == [1, 300]
    assert (held[conventions.ROLLOUT_ID].string_value, held[conventions.PROCESS].string_value) == ("ro", begun.marker)
    assert (failed.status.message, sdk.name) == ("failed", "sdk")
