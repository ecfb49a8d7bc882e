"""Cycles of `agl-otel improve`, read back from training steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_otel.adapters.cycles import cycles_of
from agl_otel.adapters.gates import ALARMS, REFUSALS
from agl_otel.types import TrainingStage, TrainingStep


def step(number: int = 1, algorithm: str = "improve", **metrics: Any) -> TrainingStep:
    return TrainingStep(
        run_id="improve-1", algorithm=algorithm, step=number, version_before="3", version_after="5", start_time=1.0, end_time=2.0,
        metrics=metrics, attempts=[("ro-1", "at-1"), ("ro-2", "at-2")], unlinked=1,
    )  # fmt: skip


def test_a_cycle_has_what_its_step_recorded() -> None:
    [found] = cycles_of(
        [step(verdict="promoted", why="", held_out_before=0.25, held_out_after=1, canary_rated=34, selection="improve-1@2")]
    )
    assert (found.verdict, found.reasons, found.selection) == ("promoted", [], "improve-1@2")
    assert (found.held_out_before, found.held_out_after, found.canary_rated, found.drift) == (0.25, 1.0, 34, None)
    assert (found.version_before, found.version_after, found.attempts, found.unlinked) == ("3", "5", 2, 1)
    assert (len(found.trace_id), len(found.span_id)) == (32, 16)


def test_every_reason_has_its_text_and_alarms_are_marked() -> None:
    [found] = cycles_of([step(verdict="refused", why=", ".join(REFUSALS))])
    assert {reason.key: reason.text for reason in found.reasons} == REFUSALS
    assert {reason.key for reason in found.reasons if reason.alarm} == ALARMS
    [unknown] = cycles_of([step(why="of a later version")])
    assert [(reason.text, reason.alarm) for reason in unknown.reasons] == [("of a later version", False)]


def test_what_is_no_number_is_none_and_other_algorithms_have_no_cycles() -> None:
    odd = cycles_of([step(drift="far", canary_mean=math.nan, canary_begun=True, backtest_gain=math.inf)])[0]
    assert (odd.drift, odd.canary_mean, odd.canary_begun, odd.backtest_gain) == (None, None, None, None)
    assert cycles_of([step(algorithm="grpo", verdict="promoted")]) == []


def stage(name: str, start: float, number: int = 2, algorithm: str = "improve", **metrics: Any) -> TrainingStage:
    about: dict[str, Any] = {"run_id": "improve-1", "algorithm": algorithm, "step": number, "name": name, "resources_id": "production"}
    return TrainingStage(**about, start_time=start, end_time=start + 0.5, metrics=metrics)


WINDOW: dict[str, Any] = {"attempts": 256, "selection": "improve-1@2", "version": "5"}
CANARY: dict[str, Any] = {
    "canary_version": "6",
    "canary_share": 0.1,
    "canary_begun": 40,
    "canary_rated": 34,
    "canary_mean": 0.5,
    "canary_promoted_mean": 0.25,
}


def test_a_cycle_under_way_has_what_its_stages_found() -> None:
    stages = [stage("window", 10.0, **WINDOW), stage("update", 11.0, training_run="grpo-2"), stage("gate", 12.0, why="", drift=0.5)]
    ended, found = cycles_of([step(verdict="promoted")], [*stages, stage("canary 1", 13.0, **CANARY)])
    assert (ended.cycle, ended.stage) == (1, "")
    assert (found.cycle, found.verdict, found.stage, found.reasons) == (2, "", "canary", [])
    assert (found.attempts, found.selection, found.training_run, found.drift) == (256, "improve-1@2", "grpo-2", 0.5)
    assert (found.version_before, found.version_after, found.resources_id) == ("5", "6", "production")
    assert (found.start_time, found.end_time, found.canary_share) == (10.0, 13.5, 0.1)
    assert found.span_id == cycles_of([step(2)])[0].span_id, "the span that it will have"


@pytest.mark.parametrize(
    ("ended", "under_way"),
    [
        ([stage("window", 1.0, waits="3 of 8 attempts are rated")], "window"),
        ([stage("window", 1.0, selection="s@1"), stage("update", 2.0, waits="the run grpo-2")], "update"),
        ([stage("window", 1.0, selection="s@1"), stage("canary", 2.0, waits="the canary's start")], "canary"),
        ([stage("canary", 2.0, waits="the canary's start"), stage("canary 1", 3.0, waits="2 of 8 rewards")], "canary"),
        ([stage("window", 1.0, selection="s@1")], "update"),
        ([stage("window", 1.0, selection="s@1"), stage("update", 2.0)], "gate"),
        ([stage("window", 1.0, selection="s@1"), stage("update", 2.0), stage("gate", 3.0, why="")], "canary"),
        ([stage("window", 1.0, selection="s@1"), stage("update", 2.0), stage("gate", 3.0, why="drift")], "verdict"),
        (
            [stage("window", 1.0, selection="s@1"), stage("update", 2.0), stage("gate", 3.0, why=""), stage("canary", 4.0, why="")],
            "verdict",
        ),
        ([stage("gate", 1.0, why="drift"), stage("window", 2.0, selection="s@1")], "update"),  # of an earlier try, whose folder was removed
    ],
)
def test_the_stage_under_way_is_the_one_after_the_last_that_ended(ended: list[TrainingStage], under_way: str) -> None:
    _, found = cycles_of([step()], ended)
    assert found.stage == under_way
    assert ([reason.key for reason in found.reasons] == ["drift"]) == (under_way == "verdict" and len(ended) == 3)


def test_a_step_of_a_canary_under_way_shows_nothing_of_the_one_before() -> None:
    begun: dict[str, Any] = {"canary_version": "7", "canary_share": 0.3, "canary_begun": 4, "canary_rated": 0}
    stages = [stage("window", 10.0, **WINDOW), stage("canary", 11.0, waits="the canary's start"), stage("canary 1", 12.0, **CANARY)]
    _, found = cycles_of([step()], [*stages, stage("canary 2", 20.0, waits="0 of 8 rewards", **begun)])
    assert (found.canary_share, found.canary_begun, found.canary_rated) == (0.3, 4, 0)
    assert (found.canary_mean, found.canary_promoted_mean) == (None, None)
    assert (found.stage, found.stage_began, found.waits, found.version_after) == ("canary", 20.0, "0 of 8 rewards", "7")
    _, between = cycles_of([step()], stages)
    assert (between.waits, between.canary_rated, between.stage) == ("", 34, "canary"), "a step that has ended waits for nothing"


def test_a_cycle_with_its_verdict_is_not_under_way() -> None:
    [found] = cycles_of([step(2, verdict="refused")], [stage("window", 1.0), stage("canary", 2.0), stage("window", 1.0, number=1)])
    assert (found.cycle, found.verdict, found.stage) == (2, "refused", "")
    assert cycles_of([], [stage("window", 1.0, number=1, algorithm="grpo")]) == []
    assert cycles_of([step(1)], [stage("window", 1.0), stage("window", 2.0, number=10**18)])[1].cycle == 2, "cycles have no gaps"
