"""Counts show refusals that affect some tasks or rewards more than others."""

from __future__ import annotations

from typing import Any

import pytest

from agl_otel.adapters.bias import NO_REWARD, TAKEN, Bias, bias_of, reward_range, task_of
from agl_otel.types import Rollout


def test_attempts_are_counted_by_outcome_reward_and_task_and_calls_by_outcome(traces: Any, row: Any, make_reward: Any) -> None:
    traces.rewards = {("ro-bad", "at-1"): [make_reward(0.0)], ("ro-none", "at-1"): []}
    traces.verdict = {("ro-bad", "at-1"): "incomplete"}
    traces.extra = [Rollout(rollout_id="ro-new", input="not begun", start_time=1)]
    built = traces.build(
        row(rollout="ro-good"), row(rollout="ro-good", call=2, prompt=[9], version="2", truncated=True),
        row(rollout="ro-bad", truncated=True), row(rollout="ro-none"),
        row(rollout="ro-part", logprobs=[]), row(rollout="ro-part", call=2),
    )  # fmt: skip
    found = bias_of(built)
    assert found.attempts == {("", TAKEN): 2, ("", "verdict_incomplete"): 1, ("", "no_reward"): 1, ("", "no_attempt"): 1}
    assert found.rewards == {
        ("1 and more", TAKEN): 2, ("0", "verdict_incomplete"): 1, (NO_REWARD, "no_reward"): 1, (NO_REWARD, "no_attempt"): 1,
    }  # fmt: skip
    assert found.calls == {TAKEN: 3, "no_logprobs": 1}
    assert (found.trajectories, found.split_reasons.total(), found.verdicts["incomplete"]) == (3, 1, 1)
    assert found.versions == {"same": 3, "mixed": 1}
    assert found.endings == {("1 and more", "truncated"): 1, ("1 and more", "whole"): 1}
    assert found.shares()["task"] == {"{}": {"verdict_incomplete": 0.25, "no_reward": 0.25}, "not begun": {"no_attempt": 1.0}}
    twice = Bias()
    twice.add(found)
    twice.add(found)
    assert (twice.attempts["", TAKEN], twice.trajectories, twice.calls["no_logprobs"]) == (4, 6, 2)


@pytest.mark.parametrize(
    ("reward", "expected"), [(None, "none"), (float("nan"), "none"), (-0.5, "below 0"), (0.0, "0"), (0.5, "0 to 1"), (1.0, "1 and more")]
)
def test_rewards_fall_into_few_ranges(reward: float | None, expected: str) -> None:
    assert reward_range(reward) == expected


def test_a_task_has_a_short_name() -> None:
    def named(given: Any, metadata: Any = None) -> str:
        return task_of(Rollout(rollout_id="ro-1", input=given, start_time=1, metadata=metadata))

    assert named({"id": 7, "q": "x"}) == "7"
    assert named({"q": "x"}, {"task": "sums"}) == "sums"
    assert named("x" * 100) == "x" * 60
    assert named([1, {"a": 2}]) == '[1, {"a": 2}]'
