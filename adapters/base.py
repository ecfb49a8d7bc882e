"""The form of an adapter: something called with one thing that answers another. Names and generics are Agent Lightning 0.3's."""

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
    """Turns one thing into another: subclass it and write `adapt`."""

    def __call__(self, source: From, /) -> To:
        """The same as `adapt`."""
        return self.adapt(source)

    @abstractmethod
    def adapt(self, source: From, /) -> To:
        """What `source` becomes."""


class TraceAdapter(Adapter[Sequence[Span], To], Generic[To]):
    """Takes the spans of one attempt, in the order in which the store gives them."""


class OtelTraceAdapter(Adapter[Sequence["ReadableSpan"], To], Generic[To]):
    """Takes spans of the OpenTelemetry SDK."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Makes triplets: prompt, response and reward, one for each model call."""
