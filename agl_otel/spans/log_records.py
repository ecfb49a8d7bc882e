"""Merge log records of model calls into their spans: messages may be sent as logs. Pure.

Up to OpenTelemetry 1.36 each message is a record; from 1.37 on one record may have all of them, as attributes like those of a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agl_otel.types import Event, Span
from agl_otel_hook import conventions

DETAILS: Final = "gen_ai.client.inference.operation.details"
"""The event with all details of a call; its attributes are those of the span, and the messages."""
_OURS: Final = f"{conventions.SPAN_LLM.split('.')[0]}."
_MESSAGES: Final = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.prompt", "gen_ai.completion", conventions.LLM_CALL)


def may_have_records(span: Span) -> bool:
    """Whether it is a model call by OpenTelemetry's conventions without messages, which log records may have."""
    attributes = span.attributes
    return "gen_ai.operation.name" in attributes and not span.events and not any(key in attributes for key in _MESSAGES)


def with_records(spans: Sequence[Span], records: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Add the log records with an event name to their spans: as events, or as attributes that the span lacks (DETAILS).

    Our own attributes are not taken from records: agents write records, and could make a span pass for a call of the proxy.
    A record is a mapping with `trace_id`, `span_id`, `event_name`, `body` (any JSON value) and `attributes`.
    """
    found: dict[tuple[str, str], list[Event]] = {}
    details: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        key, name, attributes = (record["trace_id"], record["span_id"]), record.get("event_name"), record.get("attributes") or {}
        if name == DETAILS:
            body = record.get("body")
            fields = {**(body if isinstance(body, Mapping) else {}), **attributes}
            details.setdefault(key, {}).update((name, value) for name, value in fields.items() if not name.startswith(_OURS))
        elif name:
            found.setdefault(key, []).append(Event(name=name, attributes={**attributes, "body": record.get("body")}))
    return [_with(span, found.get(key, ()), details.get(key, {})) for span in spans for key in [(span.trace_id, span.span_id)]]


def _with(span: Span, events: Sequence[Event], details: Mapping[str, Any]) -> Span:
    if not events and not details:
        return span
    return span.model_copy(update={"events": [*span.events, *events], "attributes": {**details, **span.attributes}})
