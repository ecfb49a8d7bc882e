"""What an emitter returns: the fields of the span that it made, or would have made. Names are Agent Lightning 0.3's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry import trace as otel

StatusCode = Literal["UNSET", "OK", "ERROR"]


@dataclass
class TraceStatus:
    """How a span ended."""

    status_code: StatusCode = "UNSET"
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: otel.Status) -> TraceStatus:
        """Convert the SDK's status."""
        return cls(src.status_code.name, src.description)


@dataclass
class SpanCoreFields:
    """A span without ids. Times are Unix seconds."""

    name: str
    status: TraceStatus = field(default_factory=TraceStatus)
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    start_time: float | None = None
    end_time: float | None = None
