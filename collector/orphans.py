"""Remove orphaned sums: rows of ClickHouse's summary tables (services, their spans' names, rollouts, traces) whose spans are gone.

A deletion removes the sums of its rows. Retention drops whole parts without their sums, so `agl-otel maintain` looks for orphans in each
pass over everything. No state is kept in between: a key that no stored span has is an orphan, whatever the cause. A span that arrives
while orphans are removed is summed again afterwards, so nothing is lost; sums are idempotent (schema.sql).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from agl_otel.traces.engine import Engine
from agl_otel.traces.sql import named_query

ORPHANS_PER_STATEMENT: Final = 1_000  # orphans removed per statement
ONE_BATCH: Final = "BatchId = {batch:UInt64}"


class Sum(NamedTuple):
    """A summary table that a view over the spans fills."""

    table: str
    keys: tuple[str, ...]
    refill: str
    """The query that sums one batch again."""

    @property
    def hashed(self) -> str:
        """The key as a hash: ClickHouse keeps the text of a deletion for a while, and it must not name deleted data."""
        return f"cityHash64({', '.join(self.keys)})"

    @property
    def orphans(self) -> str:
        """Query for the hashed keys that no span has."""
        return (
            f"SELECT DISTINCT {self.hashed} FROM otel.{self.table} "
            f"WHERE {self.hashed} NOT IN (SELECT DISTINCT {self.hashed} FROM otel.otel_traces) LIMIT {ORPHANS_PER_STATEMENT}"
        )

    @property
    def chosen(self) -> str:
        """Condition for rows with one of these keys."""
        return f"{self.hashed} IN {{hashes:Array(UInt64)}}"


SERVICES: Final = Sum("services", ("ServiceName", "SpanName", "SpanKind"), "refill_services")
ROLLOUTS: Final = Sum("rollout_summary_states", ("RolloutId",), "refill_rollout_summary")


def forget(engine: Engine, sums: Sequence[Sum]) -> int:
    """Remove sums without stored spans; return the number of keys. Raises ClickHouseError; it may be repeated then."""
    removed = 0
    for each in sums:
        while found := engine.select(each.orphans):
            remove(engine, each, [row[0] for row in found])
            removed += len(found)
    return removed


def remove(engine: Engine, each: Sum, hashes: Sequence[object]) -> None:
    """Remove the sums of these keys, then sum again the spans with one of them that are stored by then."""
    engine.delete(each.table, each.chosen, {"hashes": hashes})
    engine.command(named_query(each.refill).replace(ONE_BATCH, each.chosen), {"hashes": hashes})
