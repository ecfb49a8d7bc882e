"""The attempt that a span belongs to: its ids from the context's W3C baggage, else from the process's environment.

Pure but for `attempt_scope`, which attaches a context, and `begin_in`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import Context as Variables
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agl_otel_hook import conventions

Key = tuple[str, str]
"""(rollout id, attempt id); the attempt id may be empty."""


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """The attempt that code works for, and the parent of its spans."""

    rollout_id: str
    attempt_id: str
    parent: SpanContext | None = None

    @property
    def key(self) -> Key:
        """(rollout id, attempt id)."""
        return self.rollout_id, self.attempt_id


def from_environment(environ: Mapping[str, str]) -> AttemptContext | None:
    """Return the attempt that the environment names, with the parent from TRACEPARENT; None without a valid rollout id.

    Read from AGL_ROLLOUT_ID and AGL_ATTEMPT_ID, else BAGGAGE, else OTEL_RESOURCE_ATTRIBUTES: agents may pass only some of them to children.
    """
    carried = carried_context(environ)
    members = (member.partition("=") for member in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    resource = {name.strip(): unquote(value.strip()) for name, _, value in members}
    key = (
        _valid(environ.get(conventions.ENV_ROLLOUT_ID), environ.get(conventions.ENV_ATTEMPT_ID))
        or key_of(carried)
        or _valid(resource.get(conventions.ROLLOUT_ID), resource.get(conventions.ATTEMPT_ID))
    )
    if key is None:
        return None
    parent = trace.get_current_span(carried).get_span_context()
    return AttemptContext(*key, parent=parent if parent.is_valid else None)


def carried_context(environ: Mapping[str, str]) -> Context:
    """Return the context in TRACEPARENT, TRACESTATE and BAGGAGE, as OpenTelemetry defines these variables."""
    carrier = {name.lower(): environ[name] for name in ("TRACEPARENT", "TRACESTATE", "BAGGAGE") if name in environ}
    return W3CBaggagePropagator().extract(carrier, TraceContextTextMapPropagator().extract(carrier, Context()))


def key_of(context: Context | None, fallback: Key | None = None) -> Key | None:
    """Return the attempt that the baggage of `context` (None: the current one) names, else `fallback`.

    A rollout id without an attempt id gets the attempt id of `fallback` if that has the same rollout id.
    """
    members = baggage.get_all(context)
    key = _valid(members.get(conventions.ROLLOUT_ID), members.get(conventions.ATTEMPT_ID)) if members else None
    if key is None or (fallback is not None and not key[1] and fallback[0] == key[0]):
        return fallback
    return key


def with_ids(key: Key, context: Context | None = None) -> Context:
    """Return `context` (None: the current one) with the attempt's ids in its baggage."""
    context = baggage.set_baggage(conventions.ROLLOUT_ID, key[0], context)
    return baggage.set_baggage(conventions.ATTEMPT_ID, key[1], context) if key[1] else context


def parse_traceparent(traceparent: str) -> SpanContext | None:
    """Return the span context of a W3C traceparent; None where it is malformed."""
    found = trace.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())).get_span_context()
    return found if found.is_valid else None


def format_traceparent(span: SpanContext) -> str:
    """Return the W3C traceparent of a sampled span."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-01"


@contextmanager
def attempt_scope(rollout_id: str, attempt_id: str, *, traceparent: str | None = None) -> Generator[None]:
    """Run the block in a context of the attempt: its ids in baggage, and the span of `traceparent` (if any) as parent."""
    context = with_ids((rollout_id, attempt_id))
    parent = parse_traceparent(traceparent) if traceparent else None
    if parent is not None:
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent), context)
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


def begin_in(context: Context) -> None:
    """Make `context` the current one where none is attached: in all threads, tasks and callbacks, also those that run already."""
    runtime: Any = otel_context
    runtime._RUNTIME_CONTEXT = _Beginning(runtime._RUNTIME_CONTEXT, context)  # a context that is attached here would be current only here


class _Beginning:
    """OpenTelemetry's runtime context, with another one at the beginning than the empty one."""

    def __init__(self, runtime: Any, context: Context) -> None:
        self.attach, self.detach = runtime.attach, runtime.detach
        self._get_current, self._context = runtime.get_current, context
        self._empty: Context = Variables().run(runtime.get_current)

    def get_current(self) -> Context:
        """Return the current context (OpenTelemetry calls this)."""
        found = self._get_current()
        return self._context if found is self._empty else found


def _valid(rollout_id: object, attempt_id: object) -> Key | None:
    if not isinstance(rollout_id, str) or not conventions.is_valid_id(rollout_id):
        return None
    return rollout_id, attempt_id if isinstance(attempt_id, str) and conventions.is_valid_id(attempt_id) else ""
