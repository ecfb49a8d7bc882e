"""Rows of sql/facts.sql → what the verdict needs, and what pins a reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_otel.columns import AttemptKey
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
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> ReadFacts:
        """Collect the rows: one for each (attempt, marker)."""
        facts = cls()
        digest = 0
        for row in rows:
            key = (row["RolloutId"], row["AttemptId"])
            number = {name: int(row[name]) for name in _NUMBERS}
            facts.spans += number["Spans"]
            digest ^= number["Digest"]
            facts.highest_sequence[key[0]] = max(facts.highest_sequence.get(key[0], 0), number["HighestSequence"])
            if number["Hooked"]:
                facts.hooked.add(key)
            if not row["Marker"]:
                facts.unmarked[key] = (number["Spans"], number["Annotations"])
                continue
            facts.markers.setdefault(key, {})[row["Marker"]] = MarkerFacts(
                spans=number["Spans"],
                annotations=number["Annotations"],
                seal=number["SealSpans"] if number["Seals"] else None,
                dropped=number["Dropped"],
                calls=number["Calls"],
                last_call=number["LastCall"],
            )
        facts.digest = f"{digest:016x}-{facts.spans}"
        return facts


_NUMBERS = ("Spans", "Annotations", "Calls", "LastCall", "Seals", "SealSpans", "Dropped", "Hooked", "HighestSequence", "Digest")


def attempt_facts(facts: ReadFacts, attempt: Attempt) -> AttemptFacts:
    """What is known of one attempt: what is stored, and the seals that its runner handed to the queue."""
    key = (attempt.rollout_id, attempt.attempt_id)
    unmarked, annotations = facts.unmarked.get(key, (0, 0))
    return AttemptFacts(*key, attempt.seals, facts.markers.get(key, {}), unmarked, annotations, key in facts.hooked)
