"""A query of traces of any rollout as a value: service, operation, tags, times, durations. Pure; the SQL is in sql/.

A trace matches if one of its spans meets every condition, as in Jaeger. Values are passed as ClickHouse parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agl_otel.errors import UsageError
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions

MANY: Final = (1 << 32) - 1  # a limit of rows that means none
DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1500
"""Most traces in one result."""
_EARLIEST_NANO: Final = 0
_LATEST_NANO: Final = (1 << 63) - 1
_COLUMNS: Final = {
    conventions.ROLLOUT_ID: "RolloutId",
    conventions.ATTEMPT_ID: "AttemptId",
    conventions.SEQUENCE_ID: "toString(SequenceId)",
    "otel.status_code": "upper(StatusCode)",
    "otel.status_description": "StatusMessage",
    "otel.scope.name": "ScopeName",
    "otel.scope.version": "ScopeVersion",
    "span.kind": "lower(SpanKind)",
    "error": "if(StatusCode = 'Error', 'true', 'false')",
}
"""SQL of the tags that are stored as columns. The names are those shown by Jaeger."""


class FoundTrace(NamedTuple):
    """A trace found by a search. Times are those of its first and last matching spans, in Unix nanoseconds."""

    trace_id: str
    start_nano: int
    end_nano: int


@dataclass(frozen=True, kw_only=True)
class TraceQuery:
    """Traces of any rollout. Fields that are empty or 0 are ignored.

    Times are Unix nanoseconds and bound the start of a span; durations are nanoseconds. Raises UsageError for impossible values.
    """

    service: str = ""
    operation: str = ""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Attributes of the span or its resource, as texts."""
    start_nano: int = _EARLIEST_NANO
    end_nano: int = _LATEST_NANO
    min_duration: int = 0
    max_duration: int = 0
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        if not 0 < self.limit <= MAX_LIMIT:
            raise UsageError(f"the limit is {self.limit}: ask for 1 to {MAX_LIMIT} traces")
        if self.start_nano > self.end_nano:
            raise UsageError("the time range ends before it begins")
        if self.max_duration and self.min_duration > self.max_duration:
            raise UsageError("the shortest duration is longer than the longest")
        if not all(_EARLIEST_NANO <= number <= _LATEST_NANO for number in (self.start_nano, self.end_nano)):
            raise UsageError("times are Unix nanoseconds, not before 1970")

    def since(self, start_nano: int) -> TraceQuery | None:
        """Return the query restricted to spans that began at `start_nano` or later; None if that restricts nothing or leaves nothing."""
        return replace(self, start_nano=start_nano) if self.start_nano < start_nano <= self.end_nano else None

    @property
    def is_narrow(self) -> bool:
        """Whether it names a rollout or attempt, so that few rows are read whatever the times."""
        return bool({conventions.ROLLOUT_ID, conventions.ATTEMPT_ID} & self.tags.keys())

    @property
    def sql(self) -> str:
        """The SQL of the query."""
        lines = [line for line in named_query("find_traces").splitlines() if not line.startswith("--")]
        return "\n".join(lines).replace("$where", " AND ".join(self._conditions()) or "1")

    @property
    def params(self) -> dict[str, object]:
        """The parameters of the query."""
        sql = self.sql
        names = {
            f"{name}_{place}": text for place, pair in enumerate(self.tags.items()) for name, text in zip(("key", "tag"), pair, strict=True)
        }
        return {
            name: value
            for name, value in {
                "service": self.service,
                "operation": self.operation,
                "first": self.start_nano,
                "last": self.end_nano,
                "shortest": self.min_duration,
                "longest": self.max_duration,
                "limit": self.limit,
                **names,
            }.items()
            if f"{{{name}:" in sql
        }

    def _conditions(self) -> list[str]:
        """Return the conditions, those by which ClickHouse skips most rows first."""
        found = [self._tag(place, key) for place, key in enumerate(self.tags)]
        found.sort(key=lambda condition: not condition.startswith("RolloutId"))
        if self.start_nano > _EARLIEST_NANO or self.end_nano < _LATEST_NANO:
            found.append("Timestamp BETWEEN fromUnixTimestamp64Nano({first:Int64}) AND fromUnixTimestamp64Nano({last:Int64})")
        chosen = {
            "ServiceName = {service:String}": self.service,
            "SpanName = {operation:String}": self.operation,
            "Duration >= {shortest:UInt64}": self.min_duration,
            "Duration <= {longest:UInt64}": self.max_duration,
        }
        return [*found, *(condition for condition, given in chosen.items() if given)]

    def _tag(self, place: int, key: str) -> str:
        value = f"{{tag_{place}:String}}"
        if key in _COLUMNS:
            return f"{_COLUMNS[key]} = {value}"
        name = f"{{key_{place}:String}}"
        return f"(SpanAttributes[{name}] = {value} OR ResourceAttributes[{name}] = {value})"
