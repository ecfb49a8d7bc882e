"""Spans that are constructed in one step when they end, for a process of ours that makes very many of them (the proxy).

OpenTelemetry's span sets attributes one by one, each with a check and a lock, and calls every processor; that costs more than the recorded
call. Here a span begins as ids and a marker, counted in the ledger like any other, and gets everything else at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agl_otel_hook import conventions, ids
from agl_otel_hook.context import Key
from agl_otel_hook.guard import never_raises
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.wire import BareSpan, head_of

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)


class Begun(NamedTuple):
    """A span that has begun and not ended."""

    context: SpanContext
    parent: SpanContext | None
    key: Key | None
    marker: str
    """Empty for a span without an attempt."""


class WholeSpan(BareSpan):
    """An ended span, made by `WholeSpans`."""

    place: Any = None
    """For its maker's use: the proxy's journal keeps its entry of the call here."""


class WholeSpans:
    """Begin and end spans; thread-safe. `export` is called with each ended span, `on_idle` when an attempt's last open span ended."""

    def __init__(
        self, scope: str, resource: Resource, ledger: Ledger, *, export: Callable[[ReadableSpan], None], on_idle: Callable[[Key], None]
    ) -> None:
        self._scope = InstrumentationScope(scope)
        self._resource = resource
        self._ledger = ledger
        self._export = export
        self._on_idle = on_idle

    def begin(self, key: Key | None, parent: SpanContext | None) -> Begun:
        """Begin a span under `parent` (None: the root of a new trace) for the attempt `key` (None: no attempt)."""
        trace_id, span_id = (parent.trace_id, ids.span_id()) if parent is not None else ids.both()
        context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
        place = (trace_id, (parent or context).span_id)
        marker = self._ledger.started(key, context.span_id, place).marker if key is not None else ""
        return Begun(context, parent, key, marker)

    def head(self) -> tuple[bytes, bytes]:
        """Return what all of its spans have in common: resource and scope, as from `wire.head_of`."""
        context = SpanContext(1, 1, is_remote=False)
        return head_of(WholeSpan("", context, None, self._resource, {}, instrumentation_scope=self._scope))

    def made(
        self, span: Begun, name: str, kind: SpanKind, attributes: dict[str, Any], start_time: int, end_time: int, error: str | None = None
    ) -> WholeSpan:
        """Construct the ended span, for `end`. Times are Unix nanoseconds. Attributes are not checked: no None, sequences of one type."""
        if span.key is not None:
            attributes[conventions.ROLLOUT_ID] = span.key[0]
            if span.key[1]:
                attributes[conventions.ATTEMPT_ID] = span.key[1]
            attributes[conventions.PROCESS] = span.marker
        return WholeSpan(
            name,
            span.context,
            span.parent,
            self._resource,
            attributes,
            kind=kind,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, error) if error is not None else _UNSET,
            start_time=start_time,
            end_time=end_time,
        )

    @never_raises
    def end(self, span: Begun, ended: WholeSpan) -> None:
        """Count and export the ended span."""
        idle = span.key is not None and self._ledger.ended(span.key, span.context.span_id, marker=span.marker)
        self._export(ended)
        if idle and span.key is not None:
            self._on_idle(span.key)

    @never_raises
    def give_up(self, span: Begun) -> None:
        """A span that cannot be made: it is not exported, and counts as given up."""
        if span.key is None:
            return
        self._ledger.dropped(span.key, span.marker)
        if self._ledger.ended(span.key, span.context.span_id, marker=None):
            self._on_idle(span.key)
