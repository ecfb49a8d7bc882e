"""Our spans as OTLP. Pure. Ids and sequence number travel as resource attributes, as Agent Lightning 0.3 sent them, so that the
span's own attributes come back exactly as they were; a span that carries such an attribute itself gets the right one there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from agl_otel.errors import UsageError
from agl_otel.types import Span, SpanContext
from agl_otel_hook import conventions

_KINDS: Final = {name: number for number, name in enumerate(("Unspecified", "Internal", "Server", "Client", "Producer", "Consumer"))}
_STATUS: Final = {"UNSET": Status.STATUS_CODE_UNSET, "OK": Status.STATUS_CODE_OK, "ERROR": Status.STATUS_CODE_ERROR}
_INT64: Final = range(-(1 << 63), 1 << 63)


def request_of(spans: Sequence[Span]) -> ExportTraceServiceRequest:
    """One request with all of them; each is its own ResourceSpans, because its resource carries its sequence number.

    A span without a start starts now, one without an end ends as it starts. Raises UsageError for an id that OTLP cannot carry.
    """
    now = time.time_ns()
    return ExportTraceServiceRequest(resource_spans=[_resource_spans(span, now) for span in spans])


def _resource_spans(span: Span, now_nano: int) -> ResourceSpans:
    ids = {conventions.ROLLOUT_ID: span.rollout_id, conventions.ATTEMPT_ID: span.attempt_id, conventions.SEQUENCE_ID: span.sequence_id}
    own = ids if ids.keys() & span.attributes.keys() else {}
    found = ResourceSpans()
    found.resource.attributes.extend(key_values({**span.resource.attributes, **ids}))
    add_scope(found, span).spans.append(span_of(span, {**span.attributes, **own}, now_nano))
    return found


def add_scope(resource_spans: ResourceSpans, span: Span) -> ScopeSpans:
    """A new scope of these, for spans of the instrumentation that made `span`."""
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = str(span.scope.get("name") or "")
    scope_spans.scope.version = str(span.scope.get("version") or "")
    return scope_spans


def span_of(span: Span, attributes: Mapping[str, Any], now_nano: int) -> OtlpSpan:
    """The span itself, with these attributes. Raises UsageError for an id that OTLP cannot carry."""
    start = unix_nano(span.start_time, span.start_time_unix_nano) or now_nano
    otlp = OtlpSpan(
        trace_id=_id(span.trace_id, 16, f"trace id of span {span.span_id}"),
        span_id=_id(span.span_id, 8, "span id"),
        parent_span_id=_id(span.parent_id, 8, f"parent id of span {span.span_id}") if span.parent_id else b"",
        trace_state=_trace_state(span.context),
        name=span.name,
        kind=OtlpSpan.SpanKind.ValueType(_KINDS.get(span.kind, 1)),
        start_time_unix_nano=start,
        end_time_unix_nano=unix_nano(span.end_time, span.end_time_unix_nano) or start,
        attributes=key_values(attributes),
        status=Status(code=_STATUS[span.status.status_code], message=span.status.description or ""),
    )
    for event in span.events:
        otlp.events.add(name=event.name, time_unix_nano=unix_nano(event.timestamp) or start, attributes=key_values(event.attributes))
    for link in span.links:
        otlp.links.add(
            trace_id=_id(link.context.trace_id, 16, f"a link's trace id of span {span.span_id}"),
            span_id=_id(link.context.span_id, 8, f"a link's span id of span {span.span_id}"),
            trace_state=_trace_state(link.context),
            attributes=key_values(link.attributes or {}),
        )
    return otlp


def key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP."""
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value) if value in _INT64 else AnyValue(string_value=str(value))
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case None:
            return AnyValue()
        case Mapping():
            return AnyValue(kvlist_value=KeyValueList(values=key_values(value)))
        case list() | tuple():
            return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
        case _:
            return AnyValue(string_value=str(value))


def _id(text: str, length: int, what: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != length or not any(found):
        raise UsageError(f"{what} {text!r} is not {2 * length} hex digits that are not all 0: OpenTelemetry takes no other ids")
    return found


def unix_nano(seconds: float | None, nanoseconds: int | None = None) -> int:
    """Nanoseconds; the exact ones where they say the same as the seconds. 0 where there is no time."""
    if nanoseconds is not None and (seconds is None or nanoseconds / 10**9 == seconds):
        return nanoseconds
    whole, part = divmod(seconds or 0.0, 1)  # multiplied as a whole, a double of today is some hundred nanoseconds off
    return int(whole) * 10**9 + round(part * 1e9)


def _trace_state(context: SpanContext | None) -> str:
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items()) if context is not None else ""
