"""What an adapter is: spans in, something to learn from out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agl_otel.adapters.messages import to_messages
from agl_otel.types import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

From = TypeVar("From")
To = TypeVar("To")


class Adapter(Generic[From, To]):
    """Base of adapters: override `adapt`. Calling one adapts."""

    def __call__(self, source: From, /) -> To:
        """`adapt`."""
        return self.adapt(source)

    def adapt(self, source: From, /) -> To:
        """`source` as what an algorithm needs."""
        raise NotImplementedError(f"{type(self).__name__} gives no adapt")


class TraceAdapter(Adapter[Sequence[Span], To], Generic[To]):
    """From stored spans, in the order of their sequence numbers."""


class OtelTraceAdapter(Adapter[Sequence["ReadableSpan"], To], Generic[To]):
    """From spans of the OpenTelemetry SDK."""


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """Chat messages, one conversation for each model call (messages.py)."""

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        """`{"messages": [...], "tools": [...] or None}` for each model call. Raises DataError for one that cannot be read."""
        return to_messages(source)
