"""Estimates of what attempts would have earned under another policy: by hand, and against worlds of known value.

`BACKTEST_RUNS=1000` plays as many runs of each world, with the bounds for that number: a tenth of them is played by default.
"""

from __future__ import annotations

import math
import os
from typing import Final

import numpy as np
import pytest

from agl_otel.adapters.offpolicy import Estimate, Interval, Logged, bootstrap_interval, estimate, joined, tail_shape
from agl_otel.types.columns import Ragged
from tests.unit.adapters.offpolicy_worlds import WORLDS, World

RUNS: Final = int(os.environ.get("BACKTEST_RUNS", "100"))
TOLD: Final = (0.93, 0.97)
CHANCE: Final = 0.0 if RUNS >= 1000 else 3 * math.sqrt(0.05 * 0.95 / RUNS)
"""By which the share of fewer runs may differ: three standard errors."""


def logged(ratios: list[list[float]], rewards: list[list[float]], task: list[int] | None = None) -> Logged:
    """Attempts by the ratios of their calls (not logarithms)."""
    return Logged(
        Ragged.from_rows([np.log(each) for each in ratios], np.float64),
        Ragged.from_rows(rewards, np.float64),
        np.array(task or range(len(ratios)), np.int64),
    )


def test_under_the_logged_policy_the_estimate_is_the_mean_of_what_was_logged() -> None:
    found = estimate(logged([[1.0, 1.0], [1.0], [1.0, 1.0, 1.0]], [[0.0, 1.0], [0.0], [2.0, 0.0, 3.0]], [0, 0, 1]))
    assert (found.score.value, found.logged) == (pytest.approx(2.0), 2.0)
    assert found.gain.value == pytest.approx(0.0) and (found.mass, found.effective) == (1.0, 3.0)


def test_the_estimate_is_the_weighted_doubly_robust_one_computed_by_hand() -> None:
    found = estimate(logged([[2.0], [0.5], [0.5]], [[1.0], [0.0], [1.0]], [0, 0, 0]))
    baselines = [0.5, 1.0, 0.5]  # the mean of the other two
    weights = [2.0, 0.5, 0.5]
    rewards = [1.0, 0.0, 1.0]
    by_hand = sum(baselines) / 3 + sum(w * (r - b) for w, r, b in zip(weights, rewards, baselines, strict=True)) / 3.0
    assert found.score.value == pytest.approx(by_hand)
    assert (found.mass, found.effective) == (1.0, 9 / 4.5)


def test_a_reward_of_a_step_does_not_depend_on_the_weights_of_later_ones() -> None:
    first = estimate(logged([[2.0, 1.0], [0.5, 1.0], [0.5, 1.0]], [[1.0, 0.0], [0.0, 0.0], [0.5, 0.0]]))
    second = estimate(logged([[2.0, 3.0], [0.5, 0.1], [0.5, 0.2]], [[1.0, 0.0], [0.0, 0.0], [0.5, 0.0]]))
    assert first.score.value == pytest.approx(second.score.value)


def test_a_policy_that_would_write_none_of_it_is_not_told_of() -> None:
    far = Logged(
        Ragged.from_rows([[-800.0 - each] for each in range(60)], np.float64),
        logged([[1.0]] * 60, [[1.0], [0.0]] * 30).rewards,
        np.arange(60),
    )
    found = estimate(far)
    assert (found.verdict, found.doubts, found.effective) == ("cannot_tell", ("small_sample", "missing_mass"), 0.0)
    assert (found.gain.low, found.gain.high, found.score.value) == (-math.inf, math.inf, 0.5)


def test_equal_influences_have_a_point_for_an_interval() -> None:
    gains = np.full(9, 0.7) - np.full(9, 0.1) * np.ones(9)
    value = float(gains.mean())
    assert bootstrap_interval(value, gains - value, 0.95, 200, np.random.default_rng(0)) == Interval(value, value, value)
    rare = np.array([0.1 + 0.2] * 39 + [0.3])  # equal but for rounding
    assert bootstrap_interval(0.3, rare - rare.mean() + 0.3, 0.95, 200, np.random.default_rng(0)) == Interval(0.3, 0.3, 0.3)
    low = bootstrap_interval(0.0, np.array([1.0] + [0.0] * 9) - 0.1, 0.95, 2000, np.random.default_rng(0)).low
    assert -100 < low < 0, "a draw without the only one that differs is no figure"


def test_pages_are_joined_with_tasks_of_their_own() -> None:
    one, two = logged([[2.0], [1.0]], [[1.0], [0.0]], [0, 1]), logged([[1.0, 3.0]], [[0.0, 1.0]], [0])
    both = joined([one, two])
    assert both.task.tolist() == [0, 1, 2] and both.rewards.lengths.tolist() == [1, 1, 2]
    assert np.exp(both.log_ratios.values).tolist() == pytest.approx([2.0, 1.0, 1.0, 3.0])
    assert len(joined([]).task) == 0


@pytest.mark.parametrize("shape", [-0.3, 0.3, 0.7])
def test_the_shape_of_a_tail_is_found(shape: float) -> None:
    rng = np.random.default_rng(3)
    values = np.expm1(-shape * np.log1p(-rng.random(100_000))) / shape
    assert tail_shape(values) == pytest.approx(shape, abs=0.1)
    assert tail_shape(np.ones(100)) == -math.inf


def test_the_bias_of_clipping_is_within_its_bound() -> None:
    world = WORLDS["wide"]
    rng = np.random.default_rng(2)
    runs = [world.log(rng) for _ in range(200)]
    clipped = [estimate(run, clip=2.0, draws=1) for run in runs]
    bias = float(np.mean([each.score.value for each in clipped])) - world.value()
    assert min(each.clipped for each in clipped) > 0 < abs(bias)
    assert abs(bias) <= float(np.mean([each.clip_bias for each in clipped]))


def told(found: Estimate) -> bool:
    """Whether the interval may be relied on, be the new policy better or not."""
    return set(found.doubts) <= {"overlap"}


@pytest.mark.full
@pytest.mark.parametrize("name", WORLDS)
def test_intervals_cover_the_truth_as_often_as_they_say_or_nothing_is_told(name: str) -> None:
    """Where something is told in most runs, 93 to 97 % of these intervals cover the truth; else hardly any run tells something wrong."""
    world: World = WORLDS[name]
    truth, rng = world.value(), np.random.default_rng(7)
    found = [estimate(world.log(rng), draws=400, seed=run) for run in range(RUNS)]
    right = [each.score.low <= truth <= each.score.high for each in found if told(each)]
    print(f"\n{name}: told in {len(right)} of {RUNS}, {sum(right)} of them right")
    if len(right) > RUNS / 2:
        assert TOLD[0] - CHANCE <= sum(right) / len(right) <= TOLD[1] + CHANCE
    else:
        assert len(right) - sum(right) <= 0.035 * RUNS


@pytest.mark.parametrize(("good", "verdict"), [(1.0, "better"), (-1.0, "worse"), (0.0, "cannot_tell")])
def test_a_policy_that_takes_the_good_action_more_often_is_better(good: float, verdict: str) -> None:
    ratios, rewards = [[1.6], [0.4]] * 200, [[good], [0.0]] * 200  # of two actions, at 0.5 each: the new policy takes the first at 0.8
    found = estimate(logged(ratios, rewards, [0] * 400))
    assert found.score.value == pytest.approx(0.8 * good, abs=0.01) and found.verdict == verdict
