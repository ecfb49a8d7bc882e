"""What ClickHouse sums up of spans, and goes on holding when the spans are gone: services, their spans' names, rollouts, traces.

A deletion takes it along; whole parts that retention drops take nothing along, so `agl-otel maintain` looks for it with each pass over
everything. Nothing is remembered in between: what no stored span has is an orphan, whyever. A span that arrives while orphans are
removed is summed up again after that, so nothing is lost; sums are idempotent (schema.sql).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from agl_otel.traces.engine import Engine
from agl_otel.traces.sql import named_query

TOGETHER: Final = 1_000  # orphans that go in one statement
ONE_BATCH: Final = "BatchId = {batch:UInt64}"


class Sum(NamedTuple):
    """A table of sums that is fed by a view over the spans."""

    table: str
    keys: tuple[str, ...]
    refill: str
    """The query that sums one batch up again."""

    @property
    def hashed(self) -> str:
        """The key as one number. ClickHouse keeps the text of a deletion for a while: it names nothing that is to be gone."""
        return f"cityHash64({', '.join(self.keys)})"

    @property
    def orphans(self) -> str:
        """Keys that no span has, hashed."""
        return (
            f"SELECT DISTINCT {self.hashed} FROM otel.{self.table} "
            f"WHERE {self.hashed} NOT IN (SELECT DISTINCT {self.hashed} FROM otel.otel_traces) LIMIT {TOGETHER}"
        )

    @property
    def chosen(self) -> str:
        """Rows with one of these keys."""
        return f"{self.hashed} IN {{hashes:Array(UInt64)}}"


SERVICES: Final = Sum("services", ("ServiceName", "SpanName", "SpanKind"), "refill_services")
ROLLOUTS: Final = Sum("rollout_summary_states", ("RolloutId",), "refill_rollout_summary")


def forget(engine: Engine, sums: Sequence[Sum]) -> int:
    """Remove what these sums hold of spans that are not stored; how many keys. Raises ClickHouseError; then it can be asked for again."""
    gone = 0
    for each in sums:
        while found := engine.select(each.orphans):
            remove(engine, each, [row[0] for row in found])
            gone += len(found)
    return gone


def remove(engine: Engine, each: Sum, hashes: Sequence[object]) -> None:
    """Remove the sums of these keys, and sum up what is stored with one of them by then."""
    engine.delete(each.table, each.chosen, {"hashes": hashes})
    engine.command(named_query(each.refill).replace(ONE_BATCH, each.chosen), {"hashes": hashes})
