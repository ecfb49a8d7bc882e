"""Cycles of `agl-otel improve`, read back from training steps."""

from __future__ import annotations

import math
from typing import Any

from agl_otel.adapters.cycles import cycles_of
from agl_otel.adapters.gates import ALARMS, REFUSALS
from agl_otel.types import TrainingStep


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
