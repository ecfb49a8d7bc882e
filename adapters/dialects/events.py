"""Log records of model calls, put back onto their spans: in OpenTelemetry up to 1.36 messages may travel as logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agl_otel.types import Event, Span


def with_records(spans: Sequence[Span], records: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans, with the log records of theirs that have an event name as events.

    A record is a mapping with `trace_id`, `span_id`, `event_name`, `body` (any JSON value) and `attributes`.
    """
    found: dict[tuple[str, str], list[Event]] = {}
    for record in records:
        if name := record.get("event_name"):
            event = Event(name=name, attributes={**(record.get("attributes") or {}), "body": record.get("body")})
            found.setdefault((record["trace_id"], record["span_id"]), []).append(event)
    return [
        span.model_copy(update={"events": [*span.events, *found[key]]}) if (key := (span.trace_id, span.span_id)) in found else span
        for span in spans
    ]
