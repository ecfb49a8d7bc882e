"""The interface of adapters: callables that convert one type to another. Names and generics are Agent Lightning 0.3's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from agl_otel.types import Span, Triplet

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

From = TypeVar("From")
To = TypeVar("To")


class Adapter(ABC, Generic[From, To]):
    """Converts values of one type to another; subclass it and implement `adapt`."""

    def __call__(self, source: From, /) -> To:
        """Call `adapt`."""
        return self.adapt(source)

    @abstractmethod
    def adapt(self, source: From, /) -> To:
        """Convert `source`."""


class TraceAdapter(Adapter[Sequence[Span], To], Generic[To]):
    """Converts the spans of one attempt, in the store's order."""


class OtelTraceAdapter(Adapter[Sequence["ReadableSpan"], To], Generic[To]):
    """Converts spans of the OpenTelemetry SDK."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Makes triplets of prompt, response and reward, one per model call."""
