"""Spans as users see them: plain pydantic models, and their conversion from OpenTelemetry's classes.

Times are Unix seconds, as in Agent Lightning 0.3; the original nanoseconds are kept beside them where known.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from agl_otel_hook import conventions
from agl_otel_hook.attributes import AttributeValue
from agl_otel_hook.emit.fields import SpanCoreFields, StatusCode, TraceStatus

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.sdk import resources as otel_resources
    from opentelemetry.sdk import trace as otel_sdk

Attributes = dict[str, AttributeValue]
TraceState = dict[str, str]
NANOSECONDS_FROM = 1e12
"""Times above this are nanoseconds: in seconds it is the year 33658."""


def convert_timestamp(timestamp: float | None) -> float | None:
    """Convert a time in seconds or nanoseconds to Unix seconds; None and 0 become None."""
    if not timestamp:
        return None
    return timestamp / 10**9 if timestamp > NANOSECONDS_FROM else timestamp


class SpanNames(StrEnum):
    """Span names with a meaning, as listed by Agent Lightning 0.3; conventions.py has them all."""

    REWARD = conventions.SPAN_REWARD
    MESSAGE = conventions.SPAN_MESSAGE
    OBJECT = conventions.SPAN_OBJECT
    EXCEPTION = conventions.SPAN_EXCEPTION
    VIRTUAL = conventions.SPAN_VIRTUAL
    ROLLOUT_ID = conventions.ROLLOUT_ID
    ATTEMPT_ID = conventions.ATTEMPT_ID
    SPAN_SEQUENCE_ID = conventions.SEQUENCE_ID


class SpanAttributeNames(StrEnum):
    """Attribute keys of releases before 0.3."""

    MESSAGE = "message"
    OBJECT = "object"


_MAY_HOLD_BYTES: Final = frozenset({bytes, list, tuple, dict})


def in_json(value: Any) -> Any:
    """Encode bytes as base64, as in storage: JSON has no bytes, and most are no text."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return {key: in_json(item) for key, item in cast("dict[str, Any]", value).items()}
        case list() | tuple() if any(type(item) in _MAY_HOLD_BYTES for item in cast("Sequence[Any]", value)):
            return [in_json(item) for item in cast("Sequence[Any]", value)]
        case _:
            return value


Values = Annotated[dict[str, Any], PlainSerializer(in_json, return_type=dict[str, Any], when_used="json")]
"""Attributes of a stored span; bytes are base64 in JSON."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")  # as in 0.3: unknown fields are kept


class SpanContext(_Open):
    """The identity of a span. Ids are hex: 32 characters (trace) and 16 (span)."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: TraceState = Field(default_factory=dict[str, str])

    @classmethod
    def from_opentelemetry(cls, src: otel.SpanContext) -> SpanContext:
        """Convert the SDK's object."""
        state = dict(src.trace_state.items()) if src.trace_state else {}
        return cls(trace_id=f"{src.trace_id:032x}", span_id=f"{src.span_id:016x}", is_remote=src.is_remote, trace_state=state)


class Event(_Open):
    """Something that happened during a span."""

    name: str
    attributes: Values = Field(default_factory=dict[str, Any])
    timestamp: float | None = None
    time_unix_nano: int | None = None
    is_record: bool = False
    """Whether it was sent as a log record in the context of its span."""
    is_of_attempt: bool = False
    """Whether it is an evaluation of the whole attempt, which is on its first span because it has no other."""

    @classmethod
    def from_opentelemetry(cls, src: otel_sdk.Event) -> Event:
        """Convert the SDK's object."""
        time = src.timestamp
        return cls(name=src.name, attributes=_plain(src.attributes), timestamp=convert_timestamp(time), time_unix_nano=time)


class Link(_Open):
    """A link to another span."""

    context: SpanContext
    attributes: Values | None = None

    @classmethod
    def from_opentelemetry(cls, src: otel.Link) -> Link:
        """Convert the SDK's object."""
        return cls(context=SpanContext.from_opentelemetry(src.context), attributes=_plain(src.attributes) or None)


class OtelResource(BaseModel):
    """The source of a span: the attributes of the process that made it."""

    attributes: Values = Field(default_factory=dict[str, Any])
    schema_url: str = ""
    """Not stored: OpenTelemetry's ClickHouse table has no column for it."""

    @classmethod
    def from_opentelemetry(cls, src: otel_resources.Resource) -> OtelResource:
        """Convert the SDK's object."""
        return cls(attributes=_plain(src.attributes), schema_url=src.schema_url or "")


class SpanRecordingContext(Protocol):
    """An open span that records attributes, a status and exceptions."""

    def record_exception(self, exception: BaseException) -> None:
        """Record the exception with which the operation failed."""
        ...

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        ...

    def get_recorded_span(self) -> SpanCoreFields:
        """Return what has been recorded so far."""
        ...


class SpanLike(Protocol):
    """A stored, exported or emitted span."""

    @property
    def name(self) -> str:
        """The span's name."""
        ...

    @property
    def attributes(self) -> Mapping[str, Any] | None:
        """The span's attributes."""
        ...


class Span(_Open):
    """A stored span with the ids that the collector assigned."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    """32 hex characters."""
    span_id: str
    """16 hex characters."""
    parent_id: str | None = None
    name: str
    kind: str = "Internal"
    """Internal, Server, Client, Producer, Consumer or Unspecified."""
    status: TraceStatus = Field(default_factory=TraceStatus)
    attributes: Values = Field(default_factory=dict[str, Any])
    events: list[Event] = Field(default_factory=list[Event])
    links: list[Link] = Field(default_factory=list[Link])
    start_time: float | None = None
    end_time: float | None = None
    start_time_unix_nano: int | None = None
    end_time_unix_nano: int | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: OtelResource = Field(default_factory=OtelResource)
    scope: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`name` and `version` of the instrumentation that made the span."""

    @classmethod
    def from_opentelemetry(cls, src: otel_sdk.ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """Convert a span of the SDK; without a context its ids are zeros. Fields of a subclass are kept as JSON values."""
        context = src.get_span_context()
        parent, scope = src.parent, src.instrumentation_scope
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{context.trace_id if context else 0:032x}",
            span_id=f"{context.span_id if context else 0:016x}",
            parent_id=f"{parent.span_id:016x}" if parent else None,
            name=src.name,
            kind=src.kind.name.capitalize(),
            status=TraceStatus.from_opentelemetry(src.status),
            attributes=_plain(src.attributes),
            events=[Event.from_opentelemetry(event) for event in src.events],
            links=[Link.from_opentelemetry(link) for link in src.links],
            start_time=convert_timestamp(src.start_time),
            end_time=convert_timestamp(src.end_time),
            start_time_unix_nano=src.start_time,
            end_time_unix_nano=src.end_time,
            context=SpanContext.from_opentelemetry(context) if context else None,
            parent=SpanContext.from_opentelemetry(parent) if parent else None,
            resource=OtelResource.from_opentelemetry(src.resource),
            scope={"name": scope.name, "version": scope.version or ""} if scope else {},
            **_own_fields(src),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Mapping[str, Any],
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """Make a span from attributes, by default with random ids and status OK."""
        trace_id = trace_id or os.urandom(16).hex()
        span_id = span_id or os.urandom(8).hex()
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or conventions.SPAN_VIRTUAL,
            status=status or TraceStatus(status_code="OK"),
            attributes=dict(attributes),
            start_time=start_time,
            end_time=end_time,
            context=SpanContext(trace_id=trace_id, span_id=span_id),
            parent=SpanContext(trace_id=trace_id, span_id=parent_id) if parent_id else None,
            resource=resource or OtelResource(),
        )

    @classmethod
    def from_core_fields(
        cls, core: SpanCoreFields, *, rollout_id: str | None = None, attempt_id: str | None = None, sequence_id: int | None = None
    ) -> Span:
        """Make a span with random ids from an emitter's fields; it starts now if they have no start."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a dict with lists in place of the SDK's tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in (attributes or {}).items()}  # pyright: ignore[reportUnknownArgumentType]  # of any primitive


def _own_fields(src: otel_sdk.ReadableSpan) -> dict[str, Any]:
    """Return the instance fields that a subclass added; the SDK's own begin with an underscore."""
    own = {name: value for name, value in vars(src).items() if not name.startswith("_") and name not in Span.model_fields}
    return json.loads(json.dumps(own, default=str)) if own else {}


def by_attempt(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    """Return {(rollout id, attempt id): its spans}, in the order in which they come."""
    attempts: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        attempts.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    return attempts
