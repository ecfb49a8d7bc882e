"""The verdict on an attempt, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.traces.verdict import ALARM, AttemptFacts, MarkerFacts, decide


def facts(handed: dict[str, int] | None = None, unmarked: int = 0, annotations: int = 0, **markers: MarkerFacts) -> AttemptFacts:
    return AttemptFacts("ro-1", "at-1", handed, markers, unmarked, annotations)


COMPLETE = {
    "a seal that equals what is stored": facts(p=MarkerFacts(spans=3, seal=3)),
    "a count that the runner handed over": facts({"p": 3}, p=MarkerFacts(spans=3)),
    "what was handed over counts before the largest seal": facts({"p": 3}, p=MarkerFacts(spans=3, seal=2)),
    "several processes": facts({"p": 1}, p=MarkerFacts(spans=1), q=MarkerFacts(spans=2, seal=2)),
    "all calls of a proxy": facts({"x": 4}, x=MarkerFacts(spans=4, calls=2, last_call=2)),
    "unmarked spans beside marked ones": facts({"p": 1}, unmarked=5, p=MarkerFacts(spans=1)),
    "a process that ended nothing": facts({"p": 1, "idle": 0}, p=MarkerFacts(spans=1)),
    "a marked annotation beside a marked span": facts({"p": 2}, p=MarkerFacts(spans=2, annotations=1)),
}
INCOMPLETE = {
    "no seal": (facts(p=MarkerFacts(spans=3)), 0, "no seal"),
    "fewer than sealed": (facts(p=MarkerFacts(spans=1, seal=3)), 2, "2 of 3 spans are missing"),
    "more than sealed": (facts(p=MarkerFacts(spans=4, seal=3)), 0, "last seal is missing"),
    "a process of which nothing arrived": (facts({"p": 1, "q": 2}, p=MarkerFacts(spans=1)), 2, "process q"),
    "dropped by the exporter": (facts({"p": 1}, p=MarkerFacts(spans=1, dropped=2)), 0, "gave up 2"),
    "a missing call": (facts({"x": 2}, x=MarkerFacts(spans=2, calls=2, last_call=3)), 1, "model calls 1 to 3"),
    "a missing call is not counted twice": (facts({"x": 3}, x=MarkerFacts(spans=2, calls=2, last_call=3)), 1, "model calls"),
    "one bad process spoils it": (facts({"p": 1}, p=MarkerFacts(spans=1), q=MarkerFacts(spans=1)), 0, "process q"),
    "only seals, and spans said to exist": (facts(p=MarkerFacts(spans=0, seal=2)), 2, "2 of 2"),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_complete(name: str) -> None:
    verdict = decide(COMPLETE[name])
    assert (verdict.kind, verdict.missing, verdict.reasons) == ("complete", 0, [])


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_says_how_many_and_from_where(name: str) -> None:
    given_facts, missing, reason = INCOMPLETE[name]
    verdict = decide(given_facts)
    assert (verdict.kind, verdict.missing) == ("incomplete", missing)
    assert any(reason in text for text in verdict.reasons)


def test_unproven_is_an_alarm_only_where_the_runner_reported_a_hooked_agent() -> None:
    hooked = decide(replace(facts(unmarked=3, annotations=1), hooked=True))
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
        facts(p=MarkerFacts(seal=0)),
        facts({"p": 1}, p=MarkerFacts(spans=1, annotations=1)),
    ],
)
def test_nothing_but_the_attempt_and_unmarked_annotations_is_empty(nothing: AttemptFacts) -> None:
    assert decide(nothing).kind == "empty"


@given(
    st.dictionaries(st.sampled_from("pqr"), st.integers(0, 4)),
    st.dictionaries(st.sampled_from("pqr"), st.builds(MarkerFacts, spans=st.integers(0, 4), seal=st.none() | st.integers(0, 4))),
)
def test_complete_means_that_every_count_agrees(handed: dict[str, int], markers: dict[str, MarkerFacts]) -> None:
    verdict = decide(AttemptFacts("ro", "at", handed, markers))
    agrees = all(
        markers.get(m, MarkerFacts()).spans == handed.get(m, markers.get(m, MarkerFacts()).seal) for m in {*handed, *markers}
    ) and any(seen.spans for seen in markers.values())
    assert (verdict.kind == "complete") == agrees


def test_a_runners_marked_reward_does_not_prove_an_agent_that_nobody_counted() -> None:
    seen = facts({"runner": 1}, unmarked=3, runner=MarkerFacts(spans=1, annotations=1))
    assert decide(seen).kind == "unproven"
