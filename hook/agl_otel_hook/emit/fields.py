"""The return type of emitters: the fields of a span that was, or would have been, made. Names are Agent Lightning 0.3's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry import trace as otel

StatusCode = Literal["UNSET", "OK", "ERROR"]


@dataclass
class TraceStatus:
    """The status of a span."""

    status_code: StatusCode = "UNSET"
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: otel.Status) -> TraceStatus:
        """Convert the SDK's status."""
        return cls(src.status_code.name, src.description)


@dataclass
class SpanCoreFields:
    """A span without ids. Times are in Unix seconds."""

    name: str
    status: TraceStatus = field(default_factory=TraceStatus)
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    start_time: float | None = None
    end_time: float | None = None
