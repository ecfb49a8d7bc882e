"""A query of the spans of one rollout as a value: filters, order and page. Pure; the SQL around it is in sql/.

Two tables map conditions and orders to SQL. Values are passed as ClickHouse parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from agl_otel.errors import UsageError
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions

BOOKKEEPING: Final = (conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL)
"""Names of spans that are not an agent's."""
EVERYTHING: Final = 1 << 62  # largest limit to which ClickHouse can still add an offset
_COLUMNS: Final = {"trace_id": "TraceId", "span_id": "SpanId", "parent_id": "ParentSpanId", "name": "SpanName"}
_CONDITIONS: Final = {
    **{field: f"{column} = {{{field}:String}}" for field, column in _COLUMNS.items()},
    **{f"{field}_contains": f"position({column}, {{{field}_contains:String}}) > 0" for field, column in _COLUMNS.items()},
}
_ORDERS: Final = {
    **_COLUMNS,
    "sequence_id": "SequenceId",
    "start_time": "StartNano",
    "end_time": "StartNano + Duration",
    "rollout_id": "RolloutId",
    "attempt_id": "AttemptId",
    "kind": "SpanKind",
    "status": "StatusCode",
}
_EACH_ONCE: Final = "ORDER BY RolloutId, SequenceId, Timestamp, AttemptId, SpanId LIMIT 1 BY RolloutId, AttemptId, TraceId, SpanId"
"""Of the rows of one identity, that with the lowest sequence."""
_TIES: Final = "SequenceId, StartNano, AttemptId, SpanId"


@dataclass(frozen=True, kw_only=True)
class SpanQuery:
    """Spans of one rollout, or of the attempt `attempt_id` if not empty. Filters that are None are ignored.

    `limit` below 0 means all. `filter_logic` joins the filters; rollout and attempt are always required.
    """

    rollout_id: str
    attempt_id: str = ""
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: Literal["and", "or"] = "and"
    sort_by: str | None = "sequence_id"
    sort_order: Literal["asc", "desc"] = "asc"
    limit: int = -1
    hidden: tuple[str, ...] = ()
    """Names of spans to exclude."""
    offset: int = 0

    def __post_init__(self) -> None:
        if (self.sort_by or "sequence_id") not in _ORDERS:
            raise UsageError(f"spans cannot be sorted by {self.sort_by!r}: use one of {', '.join(sorted(_ORDERS))}")
        if self.filter_logic not in ("and", "or") or self.sort_order not in ("asc", "desc"):
            raise UsageError(f"filter_logic is 'and' or 'or', sort_order 'asc' or 'desc', not {self.filter_logic!r}, {self.sort_order!r}")

    @property
    def params(self) -> dict[str, object]:
        """The parameters of the query."""
        limit = self.limit if self.limit >= 0 else EVERYTHING
        page = {
            "rollouts": [self.rollout_id],
            "attempt": self.attempt_id,
            "limit": limit,
            "offset": max(0, self.offset),
            "hidden": list(self.hidden),
        }
        return {**page, **{name: getattr(self, name) for name in self._filters}}

    @property
    def page_sql(self) -> str:
        """The query for the page."""
        descending = " DESC" if self.sort_order == "desc" else ""
        order = f"{_ORDERS[self.sort_by or 'sequence_id']}{descending}, {_TIES}"
        return self._filled("query_spans").replace("$order", order)

    @property
    def is_whole(self) -> bool:
        """Whether it takes all spans of the rollout or attempt, but for hidden ones, before they are cut to a page."""
        return not self._filters

    @property
    def count_sql(self) -> str:
        """The query for the number of matches."""
        return self._filled("count_spans")

    @property
    def _filters(self) -> list[str]:
        return [name for name in _CONDITIONS if getattr(self, name) is not None]

    def _filled(self, name: str) -> str:
        where = f" {self.filter_logic.upper()} ".join(_CONDITIONS[name] for name in self._filters)
        lines = [line for line in named_query(name).splitlines() if not line.startswith("--")]
        return (
            "\n".join(lines)
            .replace("$where", f"({where or 1}) AND SpanName NOT IN {{hidden:Array(String)}}")
            .replace("$spans", named_query("spans") + _EACH_ONCE)
        )
