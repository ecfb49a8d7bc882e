"""Is an attempt fit for training? A pure function over counts (contracts.md §6).

Spans with a process marker are counted on both sides, annotations included, seals not; spans without a marker never are. What a
process says it ended (handed to the queue when the attempt ended, or else its largest seal) must be what is stored.

Annotations prove nothing about the agent: a runner's own marked reward does not make an attempt complete whose agent nobody counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agl_otel.types import Verdict, VerdictKind

ALARM: Final = "its agent ran under the hook, and no process counted its spans: is its telemetry set up by somebody else?"


@dataclass(frozen=True, slots=True)
class MarkerFacts:
    """What is stored of one process in one attempt."""

    spans: int = 0
    """Distinct spans with the marker; seals not."""
    annotations: int = 0
    """How many of those are annotations."""
    seal: int | None = None
    """The largest seal that is stored; None where there is none."""
    dropped: int = 0
    """How many spans its exporter gave up."""
    calls: int = 0
    """Distinct model call numbers."""
    last_call: int = 0
    """The highest model call number."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What is known of one attempt."""

    rollout_id: str
    attempt_id: str
    handed: Mapping[str, int] | None = None
    """{marker: spans ended}, as the runner handed it to the queue; None where it did not."""
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict[str, MarkerFacts])
    unmarked: int = 0
    """Distinct spans without a marker, the attempt span not counted."""
    unmarked_annotations: int = 0
    """How many of those are annotations."""
    hooked: bool = False
    """Whether its runner started the agent under our hook."""


def decide(facts: AttemptFacts) -> Verdict:
    """The verdict, with what is missing and from which process."""
    missing = 0
    reasons: list[str] = []
    handed = facts.handed or {}
    for marker in sorted({*facts.markers, *handed}):
        seen = facts.markers.get(marker, MarkerFacts())
        lost, why = _marker(marker, seen, handed.get(marker, seen.seal))
        missing += lost
        reasons += why
    kind = _kind(facts, reasons)
    alarm = facts.hooked and kind == "unproven"
    if alarm:
        reasons.append(ALARM)
    return Verdict(rollout_id=facts.rollout_id, attempt_id=facts.attempt_id, kind=kind, missing=missing, reasons=reasons, alarm=alarm)


def _kind(facts: AttemptFacts, reasons: list[str]) -> VerdictKind:
    if reasons:
        return "incomplete"
    if any(seen.spans > seen.annotations for seen in facts.markers.values()):
        return "complete"
    return "unproven" if facts.unmarked > facts.unmarked_annotations else "empty"


def _marker(marker: str, seen: MarkerFacts, expected: int | None) -> tuple[int, list[str]]:
    """(how many are missing, why) of one process."""
    reasons: list[str] = []
    missing = 0
    if expected is None:
        reasons.append(f"process {marker} sent no seal: it may have ended before its last spans were sent ({seen.spans} are stored)")
    elif seen.spans < expected:
        missing = expected - seen.spans
        reasons.append(f"process {marker}: {missing} of {expected} spans are missing")
    elif seen.spans > expected:
        reasons.append(f"process {marker}: {seen.spans} spans are stored, and it says that it ended {expected}: its last seal is missing")
    if seen.dropped:
        reasons.append(f"process {marker}: its exporter gave up {seen.dropped} spans")
    if seen.calls < seen.last_call:
        gaps = seen.last_call - seen.calls
        missing = max(missing, gaps)
        reasons.append(f"process {marker}: {gaps} of the model calls 1 to {seen.last_call} are missing")
    return missing, reasons
