"""Merge log records of model calls into their spans: messages and evaluations may be sent as logs. Pure.

Up to OpenTelemetry 1.36 each message is a record; from 1.37 on one record may have all of them, as attributes like those of a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    said = any(event.name != conventions.EVALUATION for event in span.events)
    return "gen_ai.operation.name" in attributes and not said and not any(key in attributes for key in _MESSAGES)


def with_records(spans: Sequence[Span], records: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Add the log records with an event name to their spans: as events, or as attributes that the span lacks (DETAILS).

    DETAILS that is an event of its span becomes attributes, too. Our own attributes are not taken from either: agents write them, and could
    make a span pass for a call of the proxy.
    A record is a mapping with `trace_id`, `span_id`, `event_name`, `body` (any JSON value) and `attributes`.
    """
    found: dict[tuple[str, str], list[Event]] = {}
    details: dict[tuple[str, str], dict[str, Any]] = {}

    def add(key: tuple[str, str], fields: Mapping[str, Any]) -> None:
        details.setdefault(key, {}).update((name, value) for name, value in fields.items() if not name.startswith(_OURS))

    for span in spans:
        for event in span.events:
            if event.name == DETAILS:
                add((span.trace_id, span.span_id), event.attributes)
    for record in records:
        key, name, attributes = (record["trace_id"], record["span_id"]), record.get("event_name"), record.get("attributes") or {}
        if name == DETAILS:
            body = record.get("body")
            add(key, {**(body if isinstance(body, Mapping) else {}), **attributes})
        elif name:
            found.setdefault(key, []).append(Event(name=name, attributes={**attributes, "body": record.get("body")}, is_record=True))
    return [_with(span, found.get(key, ()), details.get(key, {})) for span in spans for key in [(span.trace_id, span.span_id)]]


def with_evaluations(spans: Sequence[Span], records: Iterable[Mapping[str, Any]], *, whole: bool) -> list[Span]:
    """Add evaluations that are log records to their spans, as events.

    A record's span is that with its ids, else that of the model call whose response it names. Any other is of its attempt
    (`is_of_attempt`), and on the first span of it if `spans` are whole attempts; of an attempt without spans on one of its own, whose ids
    are empty. A record is a mapping with `rollout_id`, `attempt_id`, `trace_id`, `span_id`, `response_id` and `event`.
    """
    keys = [
        (span.rollout_id, span.attempt_id, span.trace_id, span.span_id, str(span.attributes.get(conventions.RESPONSE_ID, "")))
        for span in spans
    ]
    added: dict[int, list[Event]] = {}
    first = {key[:2]: place for place, key in reversed([*enumerate(keys)])}
    alone: dict[tuple[str, str], list[Event]] = {}
    for record, place in evaluated(keys, records):
        if place is not None:
            added.setdefault(place, []).append(record["event"])
        elif whole:
            attempt = (record["rollout_id"], record["attempt_id"])
            events = added.setdefault(first[attempt], []) if attempt in first else alone.setdefault(attempt, [])
            events.append(record["event"].model_copy(update={"is_of_attempt": True}))
    found = [
        span.model_copy(update={"events": [*span.events, *added[place]]}) if place in added else span for place, span in enumerate(spans)
    ]
    return found + [
        Span(rollout_id=rollout, attempt_id=attempt, sequence_id=0, trace_id="", span_id="", name=conventions.EVALUATION, events=events)
        for (rollout, attempt), events in alone.items()
    ]


def evaluated(
    keys: Sequence[tuple[str, str, str, str, str]], records: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], int | None]]:
    """Yield each record of `with_evaluations` with the place of its span, if any, in `keys`: (rollout, attempt, trace, span, response)."""
    places: dict[tuple[str, ...], int] = {}
    for place, (*attempt, trace_id, span_id, response) in enumerate(keys):
        places.setdefault((*attempt, trace_id, span_id), place)
        if response:
            places.setdefault((*attempt, response), place)
    for record in records:
        attempt = (record["rollout_id"], record["attempt_id"])
        wanted = ((*attempt, record["trace_id"], record["span_id"]), (*attempt, record["response_id"]))
        yield record, next((places[key] for key in wanted if key in places), None)


def _with(span: Span, events: Sequence[Event], details: Mapping[str, Any]) -> Span:
    if not events and not details:
        return span
    return span.model_copy(update={"events": [*span.events, *events], "attributes": {**details, **span.attributes}})
