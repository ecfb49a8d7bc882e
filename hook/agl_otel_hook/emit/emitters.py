"""Emitters: rewards, annotations, messages, objects and exceptions as spans."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from agl_otel_hook import conventions
from agl_otel_hook.attributes import (
    PRIMITIVES,
    check_attributes_sanity,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    sanitize_attributes,
)
from agl_otel_hook.emit.fields import SpanCoreFields, TraceStatus

PRIMARY: Final = "primary"
"""Name of a reward that is a bare number."""
TRACER: Final = "agl_otel.emit"
_log = logging.getLogger(__name__)


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Emit a reward: a number, or {name: number} with `primary_key` as the name of the primary one.

    Its span has an event for each, as OpenTelemetry records evaluations, for other tools; ours read the attributes.

    Raises TypeError for a reward that is neither, ValueError for a dimension that is not a number or a missing primary key.
    """
    held: dict[str, Any] = {}
    dimensions = _dimensions(reward, primary_key)
    for index, (name, value) in enumerate(dimensions):
        held[conventions.reward_name_key(index)] = name
        held[conventions.reward_value_key(index)] = value
    held = flatten_attributes({**held, **(attributes or {})})
    check_attributes_sanity(held)
    return _emit(conventions.SPAN_ANNOTATION, held, propagate, ok=True, evaluations=dimensions)


def as_number(value: Any) -> float | None:
    """Return a number, or a scalar of numpy or torch, as Python's own; None for anything else."""
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    return plain if isinstance(plain, (int, float)) else None


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Emit any attributes; nested mappings and lists get dotted keys. Raises ValueError for a value of an unsupported type."""
    held = flatten_attributes(annotation)
    check_attributes_sanity(held)
    return _emit(conventions.SPAN_ANNOTATION, held, propagate, ok=True)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> SpanCoreFields:
    """Emit a text. Raises TypeError for anything else."""
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise TypeError(f"emit_message takes a str, not {type(message).__name__}: use emit_object")
    return _emit(conventions.SPAN_MESSAGE, {**flatten_attributes(attributes or {}), conventions.MESSAGE_BODY: message}, propagate)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> SpanCoreFields:  # noqa: A002 - 0.3's name
    """Emit an object: primitives and bytes as a literal, others as JSON. Raises RuntimeError where JSON cannot represent it."""
    return _emit(conventions.SPAN_OBJECT, {**flatten_attributes(attributes or {}), **encode_object(object)}, propagate, ok=True)


def encode_object(object: Any) -> dict[str, str]:  # noqa: A002 - 0.3's name
    """Encode an object as attributes; `get_object_value` decodes them. Raises RuntimeError where JSON cannot represent it."""
    held = {conventions.OBJECT_TYPE: full_qualified_name(type(object))}
    if isinstance(object, PRIMITIVES):
        return {**held, conventions.OBJECT_LITERAL: str(object)}
    if isinstance(object, bytes):
        return {**held, conventions.OBJECT_LITERAL: base64.b64encode(object).decode()}
    try:
        return {**held, conventions.OBJECT_JSON: json.dumps(object)}
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"{held[conventions.OBJECT_TYPE]} cannot be written as JSON ({error}): emit plain data") from error


def emit_exception(exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Emit an exception with its stack trace. Raises TypeError for anything else."""
    if not isinstance(exception, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise TypeError(f"emit_exception takes an exception, not {type(exception).__name__}")
    held = {**flatten_attributes(attributes or {}), **format_exception_attributes(exception)}
    _emit(conventions.SPAN_EXCEPTION, held, propagate, ok=True)


def warn_where_lost(span: trace.Span) -> None:
    """Log a warning if the span is not recorded, because no tracer provider is set up."""
    if not span.is_recording():
        _log.warning("a span of an emitter goes nowhere: no tracer provider is set up (run under a runner or opentelemetry-instrument)")


def _emit(
    name: str, attributes: Mapping[str, Any], propagate: bool, *, ok: bool = False, evaluations: Sequence[tuple[str, float]] = ()
) -> SpanCoreFields:
    clean = sanitize_attributes(attributes)
    now = time.time()
    if propagate:
        span = trace.get_tracer(TRACER).start_span(name, attributes=clean)
        warn_where_lost(span)
        for dimension, value in evaluations:
            span.add_event(conventions.EVALUATION, {conventions.EVALUATION_NAME: dimension, conventions.EVALUATION_SCORE: value})
        if ok:
            span.set_status(Status(StatusCode.OK))
        span.end()
    status = TraceStatus(status_code="OK" if ok else "UNSET")
    return SpanCoreFields(name=name, status=status, attributes=dict(clean), start_time=now, end_time=now)


def _dimensions(reward: object, primary_key: str | None) -> list[tuple[str, float]]:
    if (number := as_number(reward)) is not None:
        return [(PRIMARY, float(number))]
    if not isinstance(reward, Mapping):
        raise TypeError(f"a reward is a number or a dict of numbers, not {type(reward).__name__}")
    dimensions = cast("Mapping[str, Any]", reward)
    if primary_key is None or primary_key not in dimensions:
        raise ValueError(f"primary_key {primary_key!r} must be one of the reward's dimensions: {', '.join(dimensions)}")
    numbers: dict[str, float] = {}
    for name, value in dimensions.items():
        if (number := as_number(value)) is None:
            raise ValueError(f"reward dimension {name!r} is {value!r}: a number is needed")
        numbers[name] = float(number)
    return [(name, numbers[name]) for name in (primary_key, *(name for name in dimensions if name != primary_key))]
