"""Set ids and marker on every span of an attempt, in the process that makes the span, and count the spans.

A span without a known attempt is left unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from agl_otel_hook import conventions
from agl_otel_hook.context import Key, key_of
from agl_otel_hook.guard import never_raises, while_running
from agl_otel_hook.ledger import Ledger

if TYPE_CHECKING:  # a tenth of a second, wasted where there are no logs
    from opentelemetry._logs import LogRecord

UNCOUNTED = frozenset({conventions.SPAN_SEAL, conventions.SPAN_ATTEMPT})
"""Spans about an attempt that are not part of it; their makers set their attributes."""


class AttemptProcessor(SpanProcessor):
    """Set ids and marker on starting spans, and count spans as they start and end.

    Ids are those of the span's attributes, else of the baggage, else of the parent that is open here, else `fallback`. `on_idle` is called
    with the attempt when its last open span has ended. Added to a provider after the export processors, it counts a span as ended only
    when they have it. Limits on attributes, and what the agent sets, cannot take ids and marker from an ended span; if its exporter loses
    them all the same, the reader misses a span.
    """

    def __init__(self, ledger: Ledger, *, fallback: Key | None = None, on_idle: Callable[[Key], None] | None = None) -> None:
        self._ledger = ledger
        self._fallback = fallback
        self._on_idle = on_idle
        self._open: dict[int, tuple[Key, weakref.ref[Span], Mapping[str, str | bool]]] = {}

    def after_fork(self) -> None:
        """Forget the open spans of the parent process."""
        self._open.clear()

    def ending(self) -> set[int]:
        """Return the ids of spans that have ended and are not counted yet; exporters may have them or not."""
        spans = ((span_id, weak()) for span_id, (_, weak, _) in list(self._open.items()))
        return {span_id for span_id, span in spans if span is not None and span.end_time is not None}

    @never_raises
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Mark the span (OpenTelemetry calls this)."""
        if span.name in UNCOUNTED:
            return
        key = key_of_attributes(span) or key_of(parent_context, self._of_parent(span) or self._fallback)
        if key is None:
            return
        context = span.get_span_context()
        opened, span_id = self._open, context.span_id
        started = self._ledger.started(key, span_id, (context.trace_id, (span.parent or context).span_id))
        ids: dict[str, str | bool] = {conventions.ROLLOUT_ID: key[0]}
        if started.marker:
            ids[conventions.PROCESS] = started.marker
        if key[1]:
            ids[conventions.ATTEMPT_ID] = key[1]
        if started.late:
            ids[conventions.LATE] = True
        opened[span_id] = key, weakref.ref(span, lambda _: opened.pop(span_id, None)), ids  # a span may be collected without having ended
        span.set_attributes(ids)

    def _of_parent(self, span: Span) -> Key | None:
        """Return the attempt of a parent that is open here: a server's span may have had baggage that is not in the current context."""
        known = self._open.get(span.parent.span_id) if span.parent is not None else None
        return known[0] if known is not None else None

    @never_raises
    def _on_ending(self, span: ReadableSpan) -> None:
        """Restore what was set at the start (OpenTelemetry, or versions.py, calls this before any processor's `on_end`)."""
        context = span.get_span_context()
        known = self._open.get(context.span_id) if context is not None else None
        if known is not None:
            keep(span, known[2])

    @while_running
    @never_raises
    def on_end(self, span: ReadableSpan) -> None:
        """Count the span (OpenTelemetry calls this). One that ends at interpreter shutdown stays open: it cannot be exported."""
        context = span.get_span_context()
        known = self._open.pop(context.span_id, None) if context is not None else None
        if known is None or context is None:
            return
        key, _, ids = known
        marker = str(ids.get(conventions.PROCESS, "")) if context.trace_flags.sampled else None
        if self._ledger.ended(key, context.span_id, marker=marker) and self._on_idle is not None:
            self._on_idle(key)

    def shutdown(self) -> None:
        """Nothing to do: seals are sent by the Sealer."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: this processor holds no spans."""
        return True


class Shared(SpanProcessor):
    """A processor of two providers: the shutdown of this one only flushes it."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass the span on (OpenTelemetry calls this)."""
        self._processor.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass the span on (OpenTelemetry calls this)."""
        self._processor.on_end(span)

    def shutdown(self) -> None:
        """Flush, and leave the processor running."""
        self._processor.force_flush()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the processor."""
        return self._processor.force_flush(timeout_millis)


def keep(span: object, attributes: Mapping[str, str | bool | int]) -> None:
    """Set these attributes on a span of the SDK, ended or not, if a limit or the agent has taken them; no limit applies."""
    if not isinstance(span, ReadableSpan):
        return
    held = span._attributes or {}  # pyright: ignore[reportPrivateUsage]  # there is no public way past limits
    if not all(held.get(name) == value for name, value in attributes.items()):
        kept = BoundedAttributes(attributes={**held, **attributes})
        kept.dropped = span.dropped_attributes
        span._attributes = kept  # pyright: ignore[reportPrivateUsage]  # as above


def key_of_attributes(span: ReadableSpan | LogRecord) -> Key | None:
    """Return the attempt that the attributes of a span or log record name."""
    attributes = span.attributes or {}
    rollout_id = attributes.get(conventions.ROLLOUT_ID)
    return (rollout_id, str(attributes.get(conventions.ATTEMPT_ID, ""))) if isinstance(rollout_id, str) else None


def marker_of(span: ReadableSpan) -> str | None:
    """Return the process marker of a span."""
    marker = (span.attributes or {}).get(conventions.PROCESS)
    return marker if isinstance(marker, str) else None
