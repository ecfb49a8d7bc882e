"""The table of sql/traces.sql → what the verdict needs, and what pins a reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agl_otel.columns import AttemptKey
from agl_otel.traces.tokens import Table, column, strings
from agl_otel.traces.verdict import AttemptFacts, MarkerFacts
from agl_otel.types import Attempt


@dataclass
class ReadFacts:
    """What is stored of some rollouts."""

    markers: dict[AttemptKey, dict[str, MarkerFacts]] = field(default_factory=dict[AttemptKey, dict[str, MarkerFacts]])
    unmarked: dict[AttemptKey, tuple[int, int]] = field(default_factory=dict[AttemptKey, tuple[int, int]])
    """(spans, annotations among them) without a marker."""
    hooked: set[AttemptKey] = field(default_factory=set[AttemptKey])
    """Attempts whose runner started the agent under our hook."""
    spans: int = 0
    highest_sequence: dict[str, int] = field(default_factory=dict[str, int])
    digest: str = ""

    @classmethod
    def of(cls, table: Table) -> ReadFacts:
        """Count the rows of sql/traces.sql: for each (attempt, marker) once, in columns."""
        table = table.select(_READ)  # without the tokens, which are nearly all of it
        facts = cls(spans=int(column(table, "IsSpan").sum()))
        facts.digest = f"{int(np.bitwise_xor.reduce(column(table, 'Identity'))):016x}-{facts.spans}"
        highest = table.group_by("RolloutId").aggregate([("SequenceId", "max")])
        facts.highest_sequence = dict(zip(strings(highest, "RolloutId"), column(highest, "SequenceId_max").tolist(), strict=True))
        calls = table.filter(column(table, "IsCall").astype(bool)).group_by(_GROUP).aggregate([("Call", "count_distinct"), ("Call", "max")])
        numbers = {_key(row): (row["Call_count_distinct"], row["Call_max"]) for row in calls.to_pylist()}
        for row in table.group_by(_GROUP).aggregate(_COUNTS).to_pylist():
            attempt, marker = (row["RolloutId"], row["AttemptId"]), row["Process"]
            if row["Hooked_max"]:
                facts.hooked.add(attempt)
            if not marker:
                facts.unmarked[attempt] = (row["IsSpan_sum"], row["IsAnnotation_sum"])
                continue
            number, last = numbers.get((*attempt, marker), (0, 0))
            facts.markers.setdefault(attempt, {})[marker] = MarkerFacts(
                spans=row["IsSpan_sum"],
                annotations=row["IsAnnotation_sum"],
                seal=row["SealSpans_max"] if row["IsSeal_max"] else None,
                dropped=row["Dropped_max"],
                calls=number,
                last_call=last,
            )
        return facts


_GROUP: Final = ["RolloutId", "AttemptId", "Process"]
_COUNTS: Final = [
    *((name, "sum") for name in ("IsSpan", "IsAnnotation")),
    *((name, "max") for name in ("IsSeal", "SealSpans", "Dropped", "Hooked")),
]
_READ: Final = [*_GROUP, "Identity", "SequenceId", "IsCall", "Call", *(name for name, _ in _COUNTS)]


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["RolloutId"], row["AttemptId"], row["Process"]


def attempt_facts(facts: ReadFacts, attempt: Attempt) -> AttemptFacts:
    """What is known of one attempt: what is stored, and the seals that its runner handed to the queue."""
    key = (attempt.rollout_id, attempt.attempt_id)
    unmarked, annotations = facts.unmarked.get(key, (0, 0))
    return AttemptFacts(*key, attempt.seals, facts.markers.get(key, {}), unmarked, annotations, key in facts.hooked)
