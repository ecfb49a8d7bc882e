"""The verdict on an attempt, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.traces.verdict import ALARM, CLOCKS_SECONDS, NOT_HANDED_IN, NOT_LOADED, NOT_SEEN, UNCOUNTED, AttemptFacts, MarkerFacts, decide
from agl_otel.types import Answered, AttemptLedger, ProcessRecord


def facts(handed: dict[str, int] | None = None, unmarked: int = 0, annotations: int = 0, **markers: MarkerFacts) -> AttemptFacts:
    return AttemptFacts("ro-1", "at-1", handed, markers, unmarked, annotations)


COMPLETE = {
    "a last seal that equals what is stored": facts(p=MarkerFacts(spans=3, seal=3, closed=True)),
    "a count that the runner handed over": facts({"p": 3}, p=MarkerFacts(spans=3)),
    "what was handed over counts before the largest seal": facts({"p": 3}, p=MarkerFacts(spans=3, seal=2)),
    "several processes": facts({"p": 1}, p=MarkerFacts(spans=1), q=MarkerFacts(spans=2, seal=2, closed=True)),
    "all calls of a proxy": facts({"x": 4}, x=MarkerFacts(spans=4, calls=2, last_call=2)),
    "unmarked spans beside marked ones": facts({"p": 1}, unmarked=5, p=MarkerFacts(spans=1)),
    "a process that ended nothing": facts({"p": 1, "idle": 0}, p=MarkerFacts(spans=1)),
    "a marked annotation beside a marked span": facts({"p": 2}, p=MarkerFacts(spans=2, annotations=1)),
}
INCOMPLETE = {
    "no seal": (facts(p=MarkerFacts(spans=3)), 0, "no seal"),
    "a seal that is not the last, where nobody handed in what the attempt did": (
        facts(p=MarkerFacts(spans=3, seal=3, sealed_at=9.0)),
        0,
        "process p sent no last seal",
    ),
    "fewer than sealed": (facts(p=MarkerFacts(spans=1, seal=3, closed=True)), 2, "2 of 3 spans are missing"),
    "more than sealed": (facts(p=MarkerFacts(spans=4, seal=3, closed=True)), 0, "last seal is missing"),
    "a process of which nothing arrived": (facts({"p": 1, "q": 2}, p=MarkerFacts(spans=1)), 2, "process q"),
    "dropped by the exporter": (facts({"p": 1}, p=MarkerFacts(spans=1, dropped=2)), 0, "gave up 2"),
    "a missing call": (facts({"x": 2}, x=MarkerFacts(spans=2, calls=2, last_call=3)), 1, "model calls 1 to 3"),
    "a missing call is not counted twice": (facts({"x": 3}, x=MarkerFacts(spans=2, calls=2, last_call=3)), 1, "model calls"),
    "one bad process spoils it": (facts({"p": 1}, p=MarkerFacts(spans=1), q=MarkerFacts(spans=1)), 0, "process q"),
    "only seals, which count spans": (facts(p=MarkerFacts(spans=0, seal=2, closed=True)), 2, "2 of 2"),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_complete(name: str) -> None:
    verdict = decide(COMPLETE[name])
    assert (verdict.kind, verdict.missing, verdict.reasons) == ("complete", 0, [])


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_names_the_number_and_the_process(name: str) -> None:
    given_facts, missing, reason = INCOMPLETE[name]
    verdict = decide(given_facts)
    assert (verdict.kind, verdict.missing) == ("incomplete", missing)
    assert any(reason in text for text in verdict.reasons)


def test_unproven_is_an_alarm_only_where_the_runner_reported_a_hooked_agent() -> None:
    hooked = decide(replace(facts(unmarked=3, annotations=1), hooked=True, ledger=AttemptLedger(reach="elsewhere")))
    assert (hooked.kind, hooked.alarm, hooked.reasons) == ("unproven", True, [ALARM])
    assert not decide(facts(unmarked=3, annotations=1)).alarm
    for seen in (COMPLETE["several processes"], INCOMPLETE["no seal"][0], facts()):
        assert not decide(replace(seen, hooked=True)).alarm


def test_only_unmarked_spans_are_unproven() -> None:
    assert decide(facts(unmarked=3, annotations=1)).kind == "unproven"


@pytest.mark.parametrize(
    "nothing",
    [
        facts(),
        facts(unmarked=2, annotations=2),
        facts({"p": 0}),
        facts(p=MarkerFacts(seal=0, closed=True)),
        facts({"p": 1}, p=MarkerFacts(spans=1, annotations=1)),
    ],
)
def test_nothing_but_the_attempt_and_unmarked_annotations_is_empty(nothing: AttemptFacts) -> None:
    assert decide(nothing).kind == "empty"


@given(
    st.dictionaries(st.sampled_from("pqr"), st.integers(0, 4)),
    st.dictionaries(
        st.sampled_from("pqr"), st.builds(MarkerFacts, spans=st.integers(0, 4), seal=st.none() | st.integers(0, 4), closed=st.booleans())
    ),
)
def test_complete_means_that_every_count_agrees(handed: dict[str, int], markers: dict[str, MarkerFacts]) -> None:
    verdict = decide(AttemptFacts("ro", "at", handed, markers))
    last = {marker: seen.seal for marker, seen in markers.items() if seen.closed}
    agrees = all(markers.get(m, MarkerFacts()).spans == handed.get(m, last.get(m)) for m in {*handed, *markers}) and any(
        seen.spans for seen in markers.values()
    )
    assert (verdict.kind == "complete") == agrees


def test_a_runners_marked_reward_does_not_prove_an_uncounted_agent() -> None:
    seen = facts({"runner": 1}, unmarked=3, runner=MarkerFacts(spans=1, annotations=1))
    assert decide(seen).kind == "unproven"


# --- the truth table: what is seen, and what follows ---------------------------------------------------------------

AGENT = "python agent.py"


POD = AttemptLedger(reach="elsewhere", command="team/agent:1 opentelemetry-instrument python agent.py")


def ledger(*records: ProcessRecord, reach: str = "hooked", **other: object) -> AttemptLedger:
    return AttemptLedger.model_validate({"reach": reach, "command": AGENT, "processes": records, **other})


def process(begun: int, ended: int, *, abandoned: int = 0, dropped: int = 0, closed: bool = True, marker: str = "p") -> ProcessRecord:
    return ProcessRecord(pid=7, command=AGENT, marker=marker, begun=begun, ended=ended, abandoned=abandoned, dropped=dropped, closed=closed)


LOADED = ProcessRecord(pid=8, command=AGENT)
RUNNER = ProcessRecord(pid=9, command="runner", marker="r", begun=2, ended=2, closed=True, runner=True)
KILLED_RUNNER = RUNNER.model_copy(update={"closed": False})
ENDED_AT = 1000.0
AFTER = ENDED_AT + 2 * CLOCKS_SECONDS
UNRECORDED = ProcessRecord(pid=9, marker="q", no_record="Too many open files")
PROXY = {"x": "http://proxy:4000"}
CALLS = MarkerFacts(spans=2, calls=2, last_call=2)


def seen(of: AttemptLedger | None, *, hooked: bool = True, base: AttemptFacts | None = None, **markers: MarkerFacts) -> AttemptFacts:
    return replace(base or facts({}), ledger=of, hooked=hooked, markers=markers)


WHOLE: dict[str, tuple[AttemptFacts, str]] = {
    "closed, and all that it ended is stored": (seen(ledger(process(3, 3)), p=MarkerFacts(spans=3)), ""),
    "killed, and nothing was lost": (seen(ledger(process(3, 3, closed=False)), p=MarkerFacts(spans=3)), "nothing of it was lost"),
    "leaked spans of a process that closed": (
        seen(ledger(process(3, 2, abandoned=1)), p=MarkerFacts(spans=2)),
        f"process 7 ({AGENT}): 1 span was still open when it ended, or not sampled",
    ),
    "a child that was loaded and made no span": (seen(ledger(process(1, 1), LOADED), p=MarkerFacts(spans=1)), ""),
    "a ledger goes before seals, which count late spans too": (seen(ledger(process(2, 2)), p=MarkerFacts(spans=2, seal=5)), ""),
    "a parent that never arrived, without a marker": (
        replace(seen(ledger(process(1, 1)), p=MarkerFacts(spans=1)), unmarked=2, orphans=1),
        f"2 spans are not counted (1 of them with a parent that never arrived): they are {UNCOUNTED}",
    ),
    "a child that exports without the hook": (
        replace(seen(ledger(process(1, 1)), p=MarkerFacts(spans=1)), unmarked=3, unmarked_annotations=2),
        f"1 span is not counted: it is {UNCOUNTED}",
    ),
    "a command that cannot be hooked, with all its calls": (
        seen(ledger(reach="unhooked"), hooked=False, base=facts({"x": 2}), x=CALLS),
        "the agent's own spans are not counted",
    ),
    "a service that the hook is not in, with all its calls": (
        replace(seen(ledger(reach="elsewhere", command=""), hooked=False, base=facts({"x": 2}), x=CALLS), proxies=PROXY),
        "the agent's own spans are not counted: it does not run under the hook",
    ),
    "a service that the hook is not in and that exports its own": (
        replace(seen(ledger(reach="elsewhere", command=""), hooked=False, base=facts({"x": 2}), x=CALLS), unmarked=2),
        "it does not run under the hook",
    ),
    "a service that the hook is in, without the runner's knowledge": (
        seen(
            ledger(reach="elsewhere", over=ENDED_AT),
            hooked=False,
            base=facts({"x": 2}),
            p=MarkerFacts(spans=2, seal=2, sealed_at=AFTER),
            x=CALLS,
        ),
        "",
    ),
    "a function agent that only calls its model": (
        seen(AttemptLedger(reach="elsewhere"), base=facts({"x": 2, "r": 1}), r=MarkerFacts(spans=1, annotations=1), x=CALLS),
        "",
    ),
    "an agent whose hook was loaded and that only calls its model": (
        seen(ledger(LOADED), base=facts({"x": 2}), x=CALLS),
        "no process of it made a span",
    ),
    "a proxy that answered when the attempt was closed": (
        replace(seen(ledger(LOADED), base=facts({"x": 2}), x=CALLS), proxies=PROXY),
        "no process of it made a span",
    ),
    "a proxy that died, whose successor sealed for it": (
        replace(seen(ledger(LOADED), x=replace(CALLS, seal=2, closed=True)), proxies=PROXY),
        "no process of it made a span",
    ),
    "a process of another machine that sealed, with nothing open, when the agent had ended": (
        seen(ledger(reach="elsewhere", over=ENDED_AT), p=MarkerFacts(spans=2, seal=2, sealed_at=AFTER)),
        "",
    ),
    "a service that has ended all that it had begun when it answered": (
        seen(ledger(reach="elsewhere", over=ENDED_AT, answered={"p": Answered(begun=2)}), p=MarkerFacts(spans=2, seal=2)),
        "",
    ),
    "a service that answered by a stream, and sealed when it had ended": (
        seen(
            ledger(reach="elsewhere", over=ENDED_AT, answered={"p": Answered(begun=1, streamed=True)}),
            p=MarkerFacts(spans=2, seal=2, sealed_at=AFTER),
        ),
        "",
    ),
    "a service that ended in order": (
        seen(ledger(reach="elsewhere", answered={"p": Answered(begun=1)}), p=MarkerFacts(spans=2, seal=2, closed=True)),
        "",
    ),
    "a function agent, of which its runner's record tells": (
        seen(ledger(RUNNER, reach="elsewhere", command=""), base=facts({"x": 2, "r": 3}), r=MarkerFacts(spans=2, annotations=1), x=CALLS),
        "",
    ),
    "a function agent whose runner died and lost nothing": (
        seen(ledger(KILLED_RUNNER, reach="elsewhere", command=""), base=facts({"x": 2}), r=MarkerFacts(spans=2, seal=1), x=CALLS),
        "process 9 (runner) did not end in order; nothing of it was lost",
    ),
    "a command that cannot be hooked, whose runner counts its reward": (
        seen(ledger(RUNNER, reach="unhooked"), hooked=False, base=facts({"x": 2, "r": 2}), r=MarkerFacts(spans=2, annotations=2), x=CALLS),
        "the agent's own spans are not counted",
    ),
    "a hooked agent on a disk of its own, whose process sent its last seal": (
        seen(ledger(), base=facts({"x": 2}), p=MarkerFacts(spans=2, seal=2, closed=True), x=CALLS),
        "",
    ),
    "a Job under the hook that sealed": (seen(POD, base=facts({"x": 2}), p=MarkerFacts(spans=2, seal=2, closed=True), x=CALLS), ""),
    "a process without a record that sent its last seal": (
        seen(ledger(process(1, 1), UNRECORDED), p=MarkerFacts(spans=1), q=MarkerFacts(spans=2, seal=2, closed=True)),
        "",
    ),
    "a caller that the ledger knows": (
        replace(seen(ledger(process(1, 1)), base=facts({"x": 2}), p=MarkerFacts(spans=1), x=CALLS), callers={"p"}),
        "",
    ),
}
LOST: dict[str, tuple[AttemptFacts, int, str]] = {
    "in flight when it died": (
        seen(ledger(process(3, 1, closed=False)), p=MarkerFacts(spans=1)),
        2,
        f"process 7 ({AGENT}): 2 spans were in flight when it died",
    ),
    "killed inside its first span": (seen(ledger(process(1, 0, closed=False))), 1, "1 span was in flight"),
    "fewer stored than ended": (seen(ledger(process(3, 3)), p=MarkerFacts(spans=1)), 2, f"process 7 ({AGENT}): 2 of 3 spans are missing"),
    "all that it ended is missing": (seen(ledger(process(3, 3, closed=False))), 3, "3 of 3 spans are missing"),
    "given up by its exporter": (
        seen(ledger(process(3, 3, dropped=2)), p=MarkerFacts(spans=1)),
        2,
        "2 of 3 spans are missing, 2 of them given up by its exporter",
    ),
    "a child of a whole parent": (
        seen(ledger(process(2, 2), process(1, 0, closed=False, marker="q")), p=MarkerFacts(spans=2)),
        1,
        "in flight",
    ),
    "more stored than it counts": (seen(ledger(process(1, 1)), p=MarkerFacts(spans=2)), 0, "it counts 1"),
    "more stored than it counts and had open": (seen(ledger(process(2, 1, abandoned=1)), p=MarkerFacts(spans=3)), 0, "it counts 1"),
    "known by an announcement only": (seen(ledger(reach="elsewhere", over=ENDED_AT), p=MarkerFacts()), 0, "sent no seal"),
    "a function agent whose runner died in its next span, after a seal": (
        seen(
            ledger(KILLED_RUNNER.model_copy(update={"begun": 3}), reach="elsewhere", command=""),
            base=facts({"x": 2}),
            r=MarkerFacts(spans=2, seal=2),
            x=CALLS,
        ),
        1,
        "process 9 (runner): 1 span was in flight when it died",
    ),
    "a runner that died and of which nobody handed in anything": (
        seen(None, hooked=False, base=facts(), r=MarkerFacts(spans=2, seal=2, sealed_at=AFTER)),
        0,
        "process r sent no last seal",
    ),
    "the hook did not load, and its runner emits rewards": (
        seen(ledger(RUNNER), base=facts({"x": 2, "r": 2}), r=MarkerFacts(spans=2, annotations=2), x=CALLS),
        0,
        NOT_LOADED,
    ),
    "the hook did not load, and a proxy that is not registered served it": (
        seen(ledger(LOADED.model_copy(update={"runner": True})), x=replace(CALLS, seal=2, closed=True)),
        0,
        NOT_LOADED,
    ),
    "a service that sealed before the answer": (
        seen(ledger(reach="elsewhere", over=ENDED_AT), p=MarkerFacts(spans=2, seal=2, sealed_at=ENDED_AT)),
        0,
        "process p sent no last seal",
    ),
    "a service that sealed and then broke the connection": (
        seen(ledger(reach="elsewhere", over=ENDED_AT), p=MarkerFacts(spans=2, seal=2, sealed_at=ENDED_AT - 1)),
        0,
        "process p sent no last seal",
    ),
    "a service that had a span open when it answered, and never ended it": (
        seen(ledger(reach="elsewhere", over=ENDED_AT, answered={"p": Answered(begun=3)}), p=MarkerFacts(spans=2, seal=2)),
        0,
        "process p sent no last seal",
    ),
    "a service that had begun more by the end of its stream than by its beginning": (
        seen(ledger(reach="elsewhere", over=ENDED_AT, answered={"p": Answered(begun=1, streamed=True)}), p=MarkerFacts(spans=2, seal=2)),
        0,
        "process p sent no last seal",
    ),
    "a proxy whose runner died, and that nobody closed the attempt at": (
        replace(seen(None, hooked=False, base=facts(), x=replace(CALLS, seal=2, sealed_at=AFTER)), proxies=PROXY),
        0,
        "proxy http://proxy:4000 (process x) sent no last seal",
    ),
    "a proxy that is not registered and did not answer": (
        seen(ledger(LOADED), x=replace(CALLS, seal=2)),
        0,
        "process x sent no last seal",
    ),
    "a hooked agent on a disk of its own, whose process sent a seal that is not its last": (
        seen(ledger(), p=MarkerFacts(spans=2, seal=2)),
        0,
        "process p sent no last seal",
    ),
    "a child whose record could not be made, beside its parent's": (
        seen(ledger(process(1, 1)), p=MarkerFacts(spans=1), q=MarkerFacts(spans=2, seal=2)),
        0,
        "process q sent no last seal",
    ),
    "a process without a record of which nothing came": (
        seen(ledger(process(1, 1), UNRECORDED), p=MarkerFacts(spans=1)),
        0,
        "process 9, which could not keep its ledger (Too many open files), sent no seal",
    ),
    "a process without a record that made calls, and then no other sign": (
        replace(seen(ledger(UNRECORDED, reach="elsewhere"), base=facts({"x": 2}), x=CALLS), callers={"q"}),
        0,
        "process 9, which could not keep its ledger (Too many open files), sent no seal",
    ),
    "a process without a record that sent a seal that is not its last": (
        seen(ledger(UNRECORDED, reach="elsewhere"), q=MarkerFacts(spans=2, seal=2)),
        0,
        "process 9, which could not keep its ledger (Too many open files), sent no last seal",
    ),
    "a fork without a record": (
        seen(
            ledger(process(1, 1).model_copy(update={"fork_without_record": "Permission denied"}), LOADED),
            p=MarkerFacts(spans=1),
        ),
        0,
        f"process 7 ({AGENT}): a fork of it could not keep its ledger: Permission denied",
    ),
    "known by the baggage of a call only": (
        replace(seen(ledger(reach="elsewhere", command=""), base=facts({"x": 2}), x=CALLS), callers={"m"}),
        0,
        "process m made model calls, and nothing else is known of it",
    ),
    "a process that answered and of which nothing arrived": (
        seen(ledger(reach="elsewhere", answered={"m": Answered(begun=2)}), p=MarkerFacts(spans=1, seal=1, closed=True)),
        0,
        "process m sent no seal",
    ),
    "a process that had ended more when it answered than its seal says": (
        seen(ledger(reach="elsewhere", answered={"p": Answered(begun=3)}), p=MarkerFacts(spans=1, seal=1, closed=True)),
        2,
        "2 of 3 spans are missing",
    ),
    "the hook did not load": (seen(ledger(), base=facts({"x": 2}), x=CALLS), 0, NOT_LOADED),
    "a Job under the hook of which only calls are known": (
        seen(POD, base=facts({"x": 2, "r": 1}), r=MarkerFacts(spans=1, annotations=1), x=CALLS),
        0,
        f"{NOT_SEEN} ({POD.command})",
    ),
    "a Job under the hook whose spans nobody counted": (replace(seen(POD, base=facts({"x": 2}), x=CALLS), unmarked=2), 0, NOT_SEEN),
    "a Job under the hook that only announced itself": (
        seen(POD, base=facts({"x": 2}), p=MarkerFacts(), x=CALLS),
        0,
        "process p sent no seal",
    ),
    "the ledger was never handed in": (seen(None, base=facts({"x": 2}), x=CALLS), 0, NOT_HANDED_IN),
    "the ledger is unreadable": (
        seen(ledger(process(1, 1), problem="a link"), p=MarkerFacts(spans=1)),
        0,
        "the ledger of its processes is unreadable: a link",
    ),
    "a gap in a proxy's calls": (
        seen(ledger(LOADED), base=facts({"x": 2}), x=MarkerFacts(spans=2, calls=2, last_call=3)),
        1,
        "1 of the model calls 1 to 3 are missing",
    ),
    "a proxy that did not answer": (
        replace(seen(ledger(LOADED), x=replace(CALLS, seal=2)), proxies=PROXY),
        0,
        "proxy http://proxy:4000 (process x) sent no last seal",
    ),
    "a proxy whose journal was refused": (
        replace(seen(ledger(LOADED), base=facts({"x": 2}), x=replace(CALLS, dropped=1)), proxies=PROXY),
        0,
        "its journal could not be written",
    ),
    "a proxy of which nothing arrived": (replace(seen(ledger(LOADED)), proxies=PROXY), 0, "proxy http://proxy:4000"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_attempt_without_losses_is_complete(name: str) -> None:
    given_facts, note = WHOLE[name]
    verdict = decide(given_facts)
    assert (verdict.kind, verdict.missing, verdict.reasons) == ("complete", 0, [])
    assert any(note in text for text in verdict.notes) if note else verdict.notes == []


@pytest.mark.parametrize("name", LOST)
def test_an_attempt_with_losses_is_incomplete(name: str) -> None:
    given_facts, missing, reason = LOST[name]
    verdict = decide(given_facts)
    assert (verdict.kind, verdict.missing, len(verdict.reasons)) == ("incomplete", missing, 1)
    assert reason in verdict.reasons[0]


def test_a_loaded_hook_alone_proves_no_spans() -> None:
    assert decide(seen(ledger(LOADED))).kind == "empty"
    assert decide(replace(seen(ledger(LOADED)), unmarked=2)).kind == "unproven"


def test_a_span_that_was_open_at_the_end_and_is_stored_all_the_same_is_a_note() -> None:
    """As of a thread that a function agent has left in a model call."""
    verdict = decide(seen(ledger(process(3, 2, abandoned=1)), p=MarkerFacts(spans=3)))
    assert (verdict.kind, verdict.reasons) == ("complete", [])
    assert any("1 span was stored after it had ended" in note for note in verdict.notes)
