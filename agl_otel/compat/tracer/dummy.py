"""A tracer that builds spans in memory and sends nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any

from agl_otel.compat.tracer.tracer import Tracer
from agl_otel.types import Attributes, Event, Span, SpanCoreFields, StatusCode, TraceStatus
from agl_otel_hook.attributes import flatten_attributes, format_exception_attributes, sanitize_attributes

if TYPE_CHECKING:
    from agl_otel.store import Store


class InMemoryRecording:
    """A SpanRecordingContext over plain fields."""

    def __init__(self, name: str, attributes: Mapping[str, Any] | None, start_time: float | None) -> None:
        self.fields = SpanCoreFields(name=name, attributes=_clean(attributes), start_time=start_time or time.time())
        self.events: list[Event] = []

    def record_exception(self, exception: BaseException) -> None:
        """Record an exception and the status ERROR."""
        self.fields.attributes.update(format_exception_attributes(exception))
        self.record_status("ERROR", str(exception))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self.fields.attributes.update(_clean(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        self.fields.status = TraceStatus(status_code=status_code, description=description)

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the fields recorded so far."""
        return self.fields


class DummyTracer(Tracer):
    """Builds spans without any backend."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[Span] = []

    @contextlib.asynccontextmanager
    async def trace_context(  # pyright: ignore[reportIncompatibleMethodOverride]  # decorated, it has the base's type
        self,
        name: str | None = None,
        *,
        store: Store | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[DummyTracer]:
        """Enter a context that clears the last trace and records into it."""
        self._last = []
        async with self._as_active():
            yield self

    def get_last_trace(self) -> list[Span]:
        """Return the spans of `create_span` and `operation_context` in the latest trace context."""
        return list(self._last)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span of zero duration."""
        at = timestamp or time.time()
        made = SpanCoreFields(name=name, attributes=_clean(attributes), start_time=at, end_time=at, status=status or TraceStatus())
        self._last.append(Span.from_core_fields(made))
        return made

    @contextlib.contextmanager
    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None, start_time: float | None = None, end_time: float | None = None
    ) -> Generator[InMemoryRecording]:
        """Record a span for the context; an exception in it is recorded and raised."""
        recording = InMemoryRecording(name, attributes, start_time)
        try:
            yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        else:
            if recording.fields.status.status_code == "UNSET":
                recording.record_status("OK")
        finally:
            recording.fields.end_time = end_time or time.time()
            self._last.append(Span.from_core_fields(recording.fields))


def _clean(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(sanitize_attributes(flatten_attributes(attributes or {})))
