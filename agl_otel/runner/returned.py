"""Spans that a function agent returns because something else has recorded them, as spans of its attempt.

Agent Lightning 0.3 took the SDK's spans, stored spans (`Span`), or names and attributes (`SpanCoreFields`), all of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agl_otel.runner.job import Job
from agl_otel.store.otlp import encodable, id_bytes, unix_nano
from agl_otel.types import Span, SpanCoreFields
from agl_otel_hook.context import parse_traceparent

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def spans_of(answer: Any, job: Job) -> list[ReadableSpan] | None:
    """Return what an agent returned as the SDK's spans; None where it is no list of spans of one kind.

    Fields without ids become children of the attempt's root span. Raises UsageError for an id that OpenTelemetry cannot carry.
    """
    if not isinstance(answer, (list, tuple)):
        return None
    items = cast("Sequence[Any]", answer)
    if all(isinstance(item, ReadableSpan) for item in items):
        return list(items)
    if all(isinstance(item, SpanCoreFields) for item in items):
        root = parse_traceparent(job.traceparent)
        return [_of_fields(fields, root) for fields in items]
    return [_of_model(item) for item in items] if all(isinstance(item, Span) for item in items) else None


def _of_fields(fields: SpanCoreFields, root: SpanContext | None) -> ReadableSpan:
    span = Span.from_core_fields(fields)
    if root is not None:
        span.trace_id, span.parent_id = f"{root.trace_id:032x}", f"{root.span_id:016x}"
    return _of_model(span)


def _of_model(span: Span) -> ReadableSpan:
    start = unix_nano(span.start_time, span.start_time_unix_nano)
    return ReadableSpan(
        span.name,
        _context(span.trace_id, span.span_id, "span id"),
        _context(span.trace_id, span.parent_id, "parent id") if span.parent_id else None,
        Resource(encodable(span.resource.attributes)),
        encodable(span.attributes),
        [
            Event(event.name, encodable(event.attributes), unix_nano(event.timestamp, event.time_unix_nano) or start)
            for event in span.events
        ],
        [Link(_context(link.context.trace_id, link.context.span_id, "a link"), encodable(link.attributes or {})) for link in span.links],
        SpanKind.__members__.get(span.kind.upper(), SpanKind.INTERNAL),
        status=Status(StatusCode[span.status.status_code], span.status.description),
        start_time=start,
        end_time=unix_nano(span.end_time, span.end_time_unix_nano),
        instrumentation_scope=InstrumentationScope(str(span.scope.get("name") or ""), str(span.scope.get("version") or "")),
    )


def _context(trace_id: str, span_id: str, what: str) -> SpanContext:
    trace, span = id_bytes(trace_id, 16, f"trace id of {what} {span_id}"), id_bytes(span_id, 8, what)
    return SpanContext(int.from_bytes(trace), int.from_bytes(span), is_remote=False, trace_flags=_SAMPLED)
