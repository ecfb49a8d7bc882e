"""Converts stored spans to OTLP, by the hook's encoder (agl_otel_hook/wire.py). Pure.

Ids and sequence number are sent as resource attributes, as by Agent Lightning 0.3, so that the span's own attributes come back unchanged;
if a span itself has such an attribute, it is set to the right value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agl_otel.errors import UsageError
from agl_otel.types import Span, SpanContext
from agl_otel_hook import conventions, wire

TRACES_PATH: Final = "/v1/traces"
METRICS_PATH: Final = "/v1/metrics"
LOGS_PATH: Final = "/v1/logs"
_KINDS: Final = {name: number for number, name in enumerate(("Unspecified", "Internal", "Server", "Client", "Producer", "Consumer"))}
_STATUS: Final = {"UNSET": 0, "OK": 1, "ERROR": 2}
_ENCODED: Final = frozenset({str, bool, int, float, bytes, type(None)})


def request_of(spans: Sequence[Span]) -> bytes:
    """Serialise spans as one request; each has its own ResourceSpans, since its resource holds its sequence number.

    A span without a start starts now, one without an end ends at its start. Raises UsageError for an id that OTLP cannot carry.
    """
    now = time.time_ns()
    return b"".join(_resource_spans(span, now) for span in spans)


def _resource_spans(span: Span, now_nano: int) -> bytes:
    ids = {conventions.ROLLOUT_ID: span.rollout_id, conventions.ATTEMPT_ID: span.attempt_id, conventions.SEQUENCE_ID: span.sequence_id}
    own = ids if ids.keys() & span.attributes.keys() else {}
    resource = wire.resource_head(encodable({**span.resource.attributes, **ids}))
    return wire.of_parts(resource, scope_head(span), span_field(span, {**span.attributes, **own}, now_nano))


def scope_head(span: Span) -> bytes:
    """Encode the scope of the span's instrumentation for `wire.of_parts`."""
    return wire.scope_head(str(span.scope.get("name") or ""), str(span.scope.get("version") or ""))


def span_field(span: Span, attributes: Mapping[str, Any], now_nano: int) -> bytes:
    """Encode the span with these attributes for `wire.of_parts`. Raises UsageError for an id that OTLP cannot carry."""
    start = unix_nano(span.start_time, span.start_time_unix_nano) or now_nano
    rest = [
        wire.event_field(event.name, unix_nano(event.timestamp, event.time_unix_nano) or start, encodable(event.attributes))
        for event in span.events
    ]
    rest += [
        wire.link_field(
            id_bytes(link.context.trace_id, 16, f"a link's trace id of span {span.span_id}"),
            id_bytes(link.context.span_id, 8, f"a link's span id of span {span.span_id}"),
            encodable(link.attributes or {}),
            trace_state=_trace_state(link.context),
        )
        for link in span.links
    ]
    message = wire.message(
        id_bytes(span.trace_id, 16, f"trace id of span {span.span_id}"),
        id_bytes(span.span_id, 8, "span id"),
        id_bytes(span.parent_id, 8, f"parent id of span {span.span_id}") if span.parent_id else b"",
        span.name,
        _KINDS.get(span.kind, 1),
        start,
        unix_nano(span.end_time, span.end_time_unix_nano) or start,
        encodable(attributes),
        rest,
        (_STATUS[span.status.status_code], span.status.description or ""),
        _trace_state(span.context),
    )
    return wire.field_of(message)


def encodable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes; values of types that OTLP lacks become text."""
    return {key: value if type(value) in _ENCODED else _encodable(value) for key, value in attributes.items()}


def _encodable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return encodable(cast("Mapping[str, Any]", value))
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return items if _ENCODED.issuperset(map(type, items)) else [each if type(each) in _ENCODED else _encodable(each) for each in items]
    return value if isinstance(value, (str, int, float, bytes)) else str(value)


def id_bytes(text: str, length: int, what: str) -> bytes:
    """The bytes of an id in hex digits. Raises UsageError, which names `what` it is, for one that OTLP cannot carry."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != length or not any(found):
        raise UsageError(f"{what} {text!r} is not {2 * length} hex digits that are not all 0: OpenTelemetry takes no other ids")
    return found


def unix_nano(seconds: float | None, nanoseconds: int | None = None) -> int:
    """Return Unix nanoseconds: the exact ones if they agree with the seconds, else converted seconds; 0 without a time."""
    if nanoseconds is not None and (seconds is None or nanoseconds / 10**9 == seconds):
        return nanoseconds
    whole, part = divmod(seconds or 0.0, 1)  # multiplying today's seconds as one double would be some hundred nanoseconds off
    return int(whole) * 10**9 + round(part * 1e9)


def _trace_state(context: SpanContext | None) -> str:
    return wire.state_text(context.trace_state) if context is not None else ""
