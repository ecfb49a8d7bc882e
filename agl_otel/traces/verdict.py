"""Decides whether an attempt is fit for training: a pure function over counts (docs/traces.md).

Spans with a process marker are counted by their process and in storage, annotations included, seals not; spans without a marker are not
counted. A process is known from the runner's ledger, from counts reported to the queue, from its spans and seals, from a proxy's
registration, or from the baggage of a model call. Each known process must be whole: everything it ended is stored, and nothing was in
flight when it died. A process without a ledger proves this by its last seal, or by one sent with no open span after the agent had ended.

Annotations prove nothing about the agent: a runner's own reward span does not complete an attempt whose agent was not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from agl_otel.types import Answered, AttemptLedger, ProcessRecord, Verdict, VerdictKind

CLOCKS_SECONDS: Final = 0.5
"""Allowed difference between the clocks of a runner and a service."""

ALARM: Final = "its agent ran under the hook, and no process counted its spans: is its telemetry set up by somebody else?"
NOT_HANDED_IN: Final = "its agent ran under the hook, and nobody has handed in the ledger of its processes: its runner may have died"
NOT_LOADED: Final = "the hook was loaded in no process of its agent: it may have died at once, or its environment was replaced"
NOT_SEEN: Final = (
    "its agent was to run under the hook, and no process of it counted a span: "
    "the hook did not load, or the agent makes no spans and need not be hooked"
)


@dataclass(frozen=True, slots=True)
class MarkerFacts:
    """The stored counts of one process in one attempt."""

    spans: int = 0
    """Distinct spans with the marker that began before the runner read the ledger, without seals."""
    annotations: int = 0
    """How many of those are annotations."""
    seal: int | None = None
    """The largest stored seal; None: no seal."""
    sealed_at: float = 0.0
    """Time of the latest seal, by the process's clock (Unix seconds). Except for the last seal, no span of the attempt was open then."""
    closed: bool = False
    """Whether a stored seal is the process's last: no span of the attempt follows."""
    dropped: int = 0
    """How many spans its exporter dropped."""
    calls: int = 0
    """Distinct model call numbers."""
    last_call: int = 0
    """The highest model call number."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """All facts about one attempt that the verdict depends on."""

    rollout_id: str
    attempt_id: str
    handed: Mapping[str, int] | None = None
    """{marker: spans ended} of the runner and of the proxies at which it closed the attempt; None: not reported."""
    markers: Mapping[str, MarkerFacts] = field(default_factory=dict[str, MarkerFacts])
    unmarked: int = 0
    """Distinct spans without a marker, except the attempt span."""
    unmarked_annotations: int = 0
    """How many of those are annotations."""
    orphans: int = 0
    """How many of the spans without a marker have a parent that is not stored."""
    hooked: bool = False
    """Whether the runner started the agent under the hook."""
    ledger: AttemptLedger | None = None
    """The runner's summary of the attempt's processes; None: not reported."""
    proxies: Mapping[str, str] = field(default_factory=dict[str, str])
    """{marker: address} of the proxy processes that registered as forwarding its calls."""
    callers: Collection[str] = ()
    """Markers in the baggage of stored model calls."""


UNCOUNTED: Final = (
    "of a process without the hook, or of a tracer provider that is not the global one (set it by "
    "opentelemetry.trace.set_tracer_provider). Whether others are missing is unknown"
)


@dataclass(slots=True)
class _Findings:
    missing: int = 0
    reasons: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def lost(self, count: int, why: str) -> None:
        self.missing += count
        self.reasons.append(why)


def decide(facts: AttemptFacts) -> Verdict:
    """Return the verdict, with what is missing from which process."""
    found = _Findings()
    _judge_ledger(facts, found)
    records = facts.ledger.processes if facts.ledger else []
    recorded = {record.marker: record for record in records if record.marker and not record.no_record}
    without = {record.marker for record in records if record.no_record}
    known = {*facts.markers, *(facts.handed or {}), *facts.proxies, *facts.callers}
    markers: set[str] = {*known, *recorded, *without, *_answered(facts)}
    for marker in sorted(markers):
        seen, before = facts.markers.get(marker, MarkerFacts()), found.missing
        if (record := recorded.get(marker)) is not None:
            _judge_record(record, seen, found)
        elif marker in facts.callers and marker not in {*facts.markers, *(facts.handed or {}), *without}:
            found.lost(0, f"process {marker} made model calls, and nothing else is known of it: it may have died before it sent a span")
        else:
            _judge_counted(_name(facts, marker), seen, _expected(facts, marker, seen), found, journal=marker in facts.proxies)
        _judge_calls(_name(facts, marker), seen, found, before)
    if (uncounted := facts.unmarked - facts.unmarked_annotations) and facts.markers:
        orphans = f" ({facts.orphans} of them with a parent that never arrived)" if facts.orphans else ""
        is_, they = ("is", "it is") if uncounted == 1 else ("are", "they are")
        found.notes.append(f"{_spans(uncounted, verb=False)} {is_} not counted{orphans}: {they} {UNCOUNTED}")
    kind = _kind(facts, found.reasons)
    alarm = facts.hooked and kind == "unproven"
    if alarm:
        found.reasons.append(ALARM)
    return Verdict(
        rollout_id=facts.rollout_id,
        attempt_id=facts.attempt_id,
        kind=kind,
        missing=found.missing,
        reasons=found.reasons,
        notes=found.notes,
        alarm=alarm,
    )


def _kind(facts: AttemptFacts, reasons: list[str]) -> VerdictKind:
    if reasons:
        return "incomplete"
    if any(seen.spans > seen.annotations for seen in facts.markers.values()):
        return "complete"
    return "unproven" if facts.unmarked > facts.unmarked_annotations else "empty"


def _judge_ledger(facts: AttemptFacts, found: _Findings) -> None:
    """Judge the ledger as a whole."""
    ledger = facts.ledger
    if ledger is None:
        if facts.hooked:
            found.reasons.append(NOT_HANDED_IN)
        return
    command = f" ({ledger.command})" if ledger.command else ""
    processes = [record for record in ledger.processes if not record.runner]
    for record in ledger.processes:
        if record.fork_without_record:
            found.reasons.append(f"{_known_as(record)}: a fork of it could not keep its ledger: {record.fork_without_record}")
    if ledger.problem:
        found.reasons.append(f"the ledger of its processes is unreadable: {ledger.problem}")
    elif ledger.reach == "hooked" and not processes and not _unrecorded(facts, ledger):
        found.reasons.append(NOT_LOADED + command)
    elif ledger.reach == "elsewhere" and ledger.command and facts.hooked and not _others(facts, ledger):
        # Incomplete, not just a note: an agent without spans cannot be told from one that lost them all, and it need not be hooked.
        found.reasons.append(NOT_SEEN + command)
    if ledger.reach != "hooked" and not facts.hooked and not processes and not _counts_itself(facts, ledger):
        found.notes.append(f"the agent's own spans are not counted: it does not run under the hook{command}")
    elif ledger.reach == "hooked" and processes and not any(record.marker for record in processes):
        found.notes.append("the hook was loaded in the agent, and no process of it made a span that is counted")


def _others(facts: AttemptFacts, ledger: AttemptLedger) -> set[str]:
    """Return the processes of the agent that are known but have no record in the ledger."""
    return {*_unrecorded(facts, ledger), *facts.callers, *ledger.answered} - {*(facts.handed or {}), *facts.proxies}


def _counts_itself(facts: AttemptFacts, ledger: AttemptLedger) -> bool:
    """Whether a process of the agent without a record has counted spans."""
    return any(facts.markers[marker].spans > facts.markers[marker].annotations for marker in _unrecorded(facts, ledger))


def _unrecorded(facts: AttemptFacts, ledger: AttemptLedger) -> set[str]:
    """Return the processes of the agent with spans or seals but no record: they run elsewhere, or could not write it."""
    others = {*(facts.handed or {}), *facts.proxies, *(record.marker for record in ledger.processes if not record.no_record)}
    return {marker for marker, seen in facts.markers.items() if marker not in others and not seen.last_call}  # numbered calls are a proxy's


def _judge_record(record: ProcessRecord, seen: MarkerFacts, found: _Findings) -> None:
    """Judge a process with a record in the ledger, which has priority over its seals."""
    name = _known_as(record)
    in_flight = record.begun - record.ended - record.abandoned
    if in_flight > 0:
        found.lost(in_flight, f"{name}: {_spans(in_flight)} in flight when it died")
    elif in_flight < 0:
        found.lost(0, f"{name}: it counts more spans ended than begun")
    lost = record.ended - seen.spans
    dropped = max(record.dropped, seen.dropped)
    if lost > 0:
        given_up = f", {min(dropped, lost)} of them given up by its exporter" if dropped else ""
        found.lost(lost, f"{name}: {lost} of {record.ended} spans are missing{given_up}")
    elif lost < -record.abandoned:
        found.lost(0, f"{name}: {seen.spans} spans are stored, and it counts {record.ended}")
    elif dropped:
        found.lost(0, f"{name}: its exporter gave up {_spans(dropped, verb=False)}")
    if lost < 0:
        found.notes.append(f"{name}: {_spans(-lost)} stored after it had ended")
    if not record.closed and in_flight == lost == dropped == 0:
        found.notes.append(f"{name} did not end in order; nothing of it was lost")
    if record.abandoned:
        found.notes.append(f"{name}: {_spans(record.abandoned)} still open when it ended, or not sampled")


def _judge_counted(name: str, seen: MarkerFacts, expected: int | None, found: _Findings, *, journal: bool) -> None:
    """Judge a process by its stored and reported counts; a proxy with a `journal` counts calls missing there as dropped."""
    if expected is None:
        what = "no seal" if seen.seal is None else "no last seal"
        found.lost(0, f"{name} sent {what}: it may have ended before its last spans were sent ({seen.spans} are stored)")
    elif seen.spans < expected:
        missing = expected - seen.spans
        found.lost(missing, f"{name}: {missing} of {expected} spans are missing")
    elif seen.spans > expected:
        found.lost(0, f"{name}: {seen.spans} spans are stored, and only {expected} of it were counted: its last seal is missing")
    if seen.dropped and journal and seen.spans == expected:  # nothing was lost by its exporter
        found.lost(0, f"{name}: its journal could not be written, or has gaps: calls may be missing")
    elif seen.dropped:
        found.lost(0, f"{name}: its exporter gave up {_spans(seen.dropped, verb=False)}")


def _judge_calls(name: str, seen: MarkerFacts, found: _Findings, before: int) -> None:
    if seen.calls < seen.last_call:
        gaps = seen.last_call - seen.calls
        found.missing = max(found.missing, before + gaps)
        found.reasons.append(f"{name}: {gaps} of the model calls 1 to {seen.last_call} are missing")


def _expected(facts: AttemptFacts, marker: str, seen: MarkerFacts) -> int | None:
    """Return how many spans of a process without a record must be stored; None if nothing proves the final number.

    A seal proves it if it is the process's last, if it covers all spans begun when the process answered, or if the process was alive with
    no open span after the agent had ended (spans that begin then are late). After any other seal it may have died in its next span.
    """
    handed = (facts.handed or {}).get(marker)
    if handed is not None:
        return handed
    if seen.seal is None:
        return None
    answer, over = _answered(facts).get(marker), facts.ledger.over if facts.ledger else None
    ended_all = answer is not None and not answer.streamed and seen.seal >= answer.begun
    lived_on = over is not None and seen.sealed_at > over + CLOCKS_SECONDS
    if not (seen.closed or ended_all or lived_on):
        return None
    return max(seen.seal, answer.begun if answer is not None else 0)


def _answered(facts: AttemptFacts) -> Mapping[str, Answered]:
    return facts.ledger.answered if facts.ledger else {}


def _name(facts: AttemptFacts, marker: str) -> str:
    if facts.ledger is not None and (found := [each for each in facts.ledger.processes if each.no_record and each.marker == marker]):
        return f"process {found[0].pid}, which could not keep its ledger ({found[0].no_record}),"
    address = facts.proxies.get(marker)
    return f"proxy {address} (process {marker})" if address else f"process {marker}"


def _known_as(record: ProcessRecord) -> str:
    return f"process {record.pid} ({record.command})" if record.command else f"process {record.pid}"


def _spans(count: int, *, verb: bool = True) -> str:
    if not verb:
        return f"{count} span" if count == 1 else f"{count} spans"
    return f"{count} span was" if count == 1 else f"{count} spans were"
