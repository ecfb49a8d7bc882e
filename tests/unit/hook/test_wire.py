from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agl_otel.telemetry import otlp
from agl_otel_hook import conventions, whole, wire
from agl_otel_hook.arrays import pack_ints
from agl_otel_hook.context import Key
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.whole import WholeSpan, WholeSpans

RESOURCE = Resource({"service.name": "proxy"}, "https://schema")
SCALARS: Any = st.text() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.binary(max_size=300)
LISTS = st.lists(st.text(max_size=3)) | st.lists(st.integers(-9, 9)).map(tuple)
TIMES = st.integers(0, (1 << 64) - 1)


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


@given(st.lists(SPANS, min_size=1, max_size=3))
def test_what_is_written_directly_is_what_the_sdk_writes(spans: list[WholeSpan]) -> None:
    assert ExportTraceServiceRequest.FromString(whole.request_of(spans)) == encode_spans(spans)


def test_what_otlp_has_no_value_for_is_left_out_and_half_characters_and_huge_numbers_are_text() -> None:
    attributes: dict[str, Any] = {"huge": 1 << 64, "object": object(), "half": "\ud83d", "kept": 1}
    span = WholeSpan("n", context(1, 2), resource=RESOURCE, attributes=attributes, instrumentation_scope=InstrumentationScope("s"))
    (written,) = ExportTraceServiceRequest.FromString(whole.request_of([span])).resource_spans[0].scope_spans[0].spans
    assert {each.key: each.value.string_value or each.value.int_value for each in written.attributes} == {
        "huge": "18446744073709551616",
        "half": "\N{REPLACEMENT CHARACTER}",
        "kept": 1,
    }


def test_packed_ids_become_the_array_that_they_stand_for_beside_spans_of_the_sdk() -> None:
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
    request = ExportTraceServiceRequest.FromString(otlp.encode([*exported, theirs]))
    first, failed, sdk = (span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
    held = {each.key: each.value for each in first.attributes}
    assert [value.int_value for value in held[conventions.LLM_PROMPT_TOKEN_IDS].array_value.values] == [1, 300]
    assert (held[conventions.ROLLOUT_ID].string_value, held[conventions.PROCESS].string_value) == ("ro", begun.marker)
    assert (failed.status.message, sdk.name) == ("failed", "sdk")
