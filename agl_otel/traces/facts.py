"""Derives from the table of observed.py the facts for the verdict, and the digest that identifies the data read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agl_otel.traces.tokens import Table, column, strings
from agl_otel.traces.verdict import AttemptFacts, MarkerFacts
from agl_otel.types import Attempt
from agl_otel.types.columns import AttemptKey, digest_of


@dataclass
class ReadFacts:
    """The stored facts about some rollouts."""

    markers: dict[AttemptKey, dict[str, MarkerFacts]] = field(default_factory=dict[AttemptKey, dict[str, MarkerFacts]])
    unmarked: dict[AttemptKey, tuple[int, int]] = field(default_factory=dict[AttemptKey, tuple[int, int]])
    """(spans, annotations among them) without a marker."""
    callers: dict[AttemptKey, set[str]] = field(default_factory=dict[AttemptKey, set[str]])
    """Markers in the baggage of model calls."""
    orphans: dict[AttemptKey, int] = field(default_factory=dict[AttemptKey, int])
    """Spans without a marker whose parent is not stored."""
    hooked: set[AttemptKey] = field(default_factory=set[AttemptKey])
    """Attempts whose runner started the agent under the hook."""
    spans: int = 0
    highest_sequence: dict[str, int] = field(default_factory=dict[str, int])
    digest: str = ""

    @classmethod
    def of(cls, table: Table) -> ReadFacts:
        """Count the rows of observed.py by (attempt, marker), column-wise."""
        table = table.select(_READ)  # without the tokens, nearly all of the data
        facts = cls(spans=int(column(table, "IsSpan").sum()))
        facts.digest = digest_of(int(np.bitwise_xor.reduce(column(table, "Identity"))), facts.spans)
        highest = table.group_by("RolloutId").aggregate([("SequenceId", "max")])
        facts.highest_sequence = dict(zip(strings(highest, "RolloutId"), column(highest, "SequenceId_max").tolist(), strict=True))
        calls = table.filter(column(table, "IsCall").astype(bool)).group_by(_GROUP).aggregate([("Call", "count_distinct"), ("Call", "max")])
        numbers = {_key(row): (row["Call_count_distinct"], row["Call_max"]) for row in calls.to_pylist()}
        for row in table.group_by(_GROUP).aggregate(_COUNTS).to_pylist():
            attempt, marker = (row["RolloutId"], row["AttemptId"]), row["Process"]
            if row["Hooked_max"]:
                facts.hooked.add(attempt)
            if callers := {caller for caller in row["Caller_distinct"] if caller}:
                facts.callers.setdefault(attempt, set()).update(callers)
            if not marker:
                facts.unmarked[attempt] = (row["IsCounted_sum"], row["IsAnnotation_sum"])
                continue
            number, last = numbers.get((*attempt, marker), (0, 0))
            facts.markers.setdefault(attempt, {})[marker] = MarkerFacts(
                spans=row["IsCounted_sum"],
                annotations=row["IsAnnotation_sum"],
                seal=row["SealSpans_max"] if row["IsSeal_max"] else None,
                sealed_at=row["SealTime_max"] / 1e9,
                closed=bool(row["IsClosing_max"]),
                dropped=row["Dropped_max"],
                calls=number,
                last_call=last,
            )
        facts.orphans = _orphans(table)
        return facts


_GROUP: Final = ["RolloutId", "AttemptId", "Process"]
_COUNTS: Final = [
    *((name, "sum") for name in ("IsCounted", "IsAnnotation")),
    *((name, "max") for name in ("IsSeal", "SealSpans", "SealTime", "IsClosing", "Dropped", "Hooked")),
    ("Caller", "distinct"),
]
_READ: Final = [*_GROUP, "SpanId", "ParentSpanId", "Identity", "SequenceId", "IsSpan", "IsCall", "Call", *(name for name, _ in _COUNTS)]


def _orphans(table: Table) -> dict[AttemptKey, int]:
    """Return {attempt: number of spans without a marker whose parent is not among the rows}."""
    from pyarrow import compute

    pc: Any = compute  # untyped: its functions are generated on import
    is_unmarked = pc.and_(
        pc.and_(pc.equal(table.column("Process"), ""), pc.not_equal(table.column("ParentSpanId"), "")), column(table, "IsSpan").astype(bool)
    )
    unmarked = table.filter(is_unmarked)
    if not unmarked.num_rows:
        return {}
    unmarked = unmarked.filter(pc.invert(pc.is_in(unmarked.column("ParentSpanId"), value_set=table.column("SpanId"))))
    counts = unmarked.group_by(["RolloutId", "AttemptId"]).aggregate([("SpanId", "count")])
    return {(row["RolloutId"], row["AttemptId"]): row["SpanId_count"] for row in counts.to_pylist()}


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["RolloutId"], row["AttemptId"], row["Process"]


def attempt_facts(facts: ReadFacts, attempt: Attempt) -> AttemptFacts:
    """Combine the stored facts of one attempt with those that runners and proxies reported to the queue."""
    key = (attempt.rollout_id, attempt.attempt_id)
    unmarked, annotations = facts.unmarked.get(key, (0, 0))
    return AttemptFacts(
        *key,
        handed=attempt.seals,
        markers=facts.markers.get(key, {}),
        unmarked=unmarked,
        unmarked_annotations=annotations,
        orphans=facts.orphans.get(key, 0),
        hooked=key in facts.hooked,
        ledger=attempt.ledger,
        proxies=attempt.proxies or {},
        callers=facts.callers.get(key, ()),
    )
