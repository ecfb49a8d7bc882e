"""Replace values that OTLP cannot encode: texts with unpaired surrogates (e.g. a cut emoji) and integers of more than 64 bits.

The SDK's exporter drops an attribute with such a value, and a whole batch for a span with such a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, Status

from agl_otel_hook.guard import failures, logger
from agl_otel_hook.well_formed import is_well_formed, mended

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1


def writable(span: ReadableSpan) -> ReadableSpan:
    """Return the span if OTLP can encode it, else an encodable copy. Logged once."""
    if type(span) is not ReadableSpan or _is_writable(span):  # BareSpan: encoded by wire.py
        return span
    failures["encoding"] += 1
    if failures["encoding"] == 1:
        logger.warning(
            "agl-otel: span %a holds an unpaired surrogate or an integer of more than 64 bits: it is exported as text", span.name
        )
    return ReadableSpan(
        mended(span.name),
        span.get_span_context(),
        span.parent,
        span.resource,
        _mended_attributes(span.attributes),
        [Event(mended(event.name), _mended_attributes(event.attributes), event.timestamp) for event in span.events],
        [Link(link.context, _mended_attributes(link.attributes)) for link in span.links],
        span.kind,
        status=Status(span.status.status_code, mended(span.status.description)) if span.status.description else span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _is_writable(span: ReadableSpan) -> bool:
    return (
        is_well_formed(span.name)
        and _fit(span.attributes)
        and (not span.status.description or is_well_formed(span.status.description))
        and all(is_well_formed(event.name) and _fit(event.attributes) for event in span.events)
        and all(_fit(link.attributes) for link in span.links)
    )


def _fit(attributes: Mapping[str, Any] | None) -> bool:
    return not attributes or all(is_well_formed(key) and _fits(value) for key, value in attributes.items())


def _fits(value: Any) -> bool:
    if isinstance(value, str):
        return is_well_formed(value)
    if isinstance(value, int):
        return _LEAST <= value <= _MOST
    if isinstance(value, Sequence) and value and not isinstance(value, bytes):
        return _all_fit(cast("Sequence[Any]", value))
    return not isinstance(value, Mapping) or _fit(cast("Mapping[str, Any]", value))


def _all_fit(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))  # fast path: token ids and log-probs are long
    return kinds == {float} or (min(values) >= _LEAST and max(values) <= _MOST if kinds == {int} else all(map(_fits, values)))


def _mended_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {mended(key): _mended_value(value) for key, value in (attributes or {}).items()}


def _mended_value(value: Any) -> Any:
    if isinstance(value, str):
        return mended(value)
    if _fits(value):
        return value
    if isinstance(value, Mapping):
        return _mended_attributes(cast("Mapping[str, Any]", value))
    if isinstance(value, int):
        return str(value)
    values = cast("Sequence[Any]", value)
    return tuple(map(str, values)) if set(map(type, values)) == {int} else tuple(map(_mended_value, values))  # of one type, as before
