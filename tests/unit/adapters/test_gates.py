"""The statistics of gates and canaries, against worlds whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agl_otel.adapters.gates import (
    LEAST_RATED,
    LEAST_TASKS,
    UNSOUND,
    Asked,
    Rated,
    Rules,
    _student_quantile,  # pyright: ignore[reportPrivateUsage]
    canary_verdict,
    difference_bounds,
    divergence,
    paired_gain,
    refusals,
    trusted_lags,
)
from agl_otel.adapters.offpolicy import Estimate, Interval
from agl_otel.errors import DataError


@pytest.mark.parametrize("tasks", [8, 20, 64, 200])
@pytest.mark.parametrize("right", [(0.5, 0.5), (0.9, 0.9), (0.97, 0.97), (0.5, 0.7), (0.2, 0.9)])
def test_the_interval_of_a_held_out_gain_is_rarely_above_or_below_the_truth(tasks: int, right: tuple[float, float]) -> None:
    rng, above, below = np.random.default_rng(tasks), 0, 0
    for _ in range(1000):
        before, after = (rng.random(tasks) < chance for chance in right)
        gain = paired_gain(before.tolist(), after.tolist())
        above += gain.low > right[1] - right[0]
        below += gain.high < right[1] - right[0]
    assert max(above, below) <= 38, "2.5 %, and 2.6 standard errors of a thousand runs"


def test_the_interval_narrows_to_the_gain() -> None:
    gain = paired_gain([0.0] * 4000, [0.0, 1.0] * 2000)
    assert gain.value == 0.5 and gain.low == pytest.approx(0.5 - 1.96 * 0.5 / 4000**0.5, abs=1e-3)
    assert gain.high - gain.low == pytest.approx(2 * 1.96 * 0.5 / 4000**0.5, rel=0.01)


def test_a_gain_of_few_tasks_is_none_until_five_agree() -> None:
    """By the sign test four do by chance in 6 %, five in 3 %."""
    assert [paired_gain([0.0] * count, [1.0] * count).low > 0 for count in range(1, 8)] == [False] * 4 + [True] * 3


def test_fewer_than_the_least_tasks_never_differ() -> None:
    rng = np.random.default_rng(0)
    for tasks in range(2, LEAST_TASKS):
        assert all(paired_gain([0.0] * tasks, rng.exponential(size=tasks).tolist()).low <= 0 for _ in range(2000))
    assert paired_gain([0.0] * LEAST_TASKS, [1.0] * LEAST_TASKS).low > 0


@pytest.mark.parametrize(("before", "after"), [([], []), ([0.0, 1.0], [0.0])])
def test_a_gain_is_of_the_same_tasks(before: list[float], after: list[float]) -> None:
    with pytest.raises(DataError, match=f"these are {len(before)} and {len(after)}"):
        paired_gain(before, after)


@pytest.mark.parametrize("asked", ["not_worse", "better"])
def test_a_gain_that_is_no_number_speaks_against(asked: Asked) -> None:
    nothing = Interval(math.nan, math.nan, math.nan)
    assert refusals(Rules(held_out=asked), held_out=nothing, backtest=None, trusted=None, lags=False, drift=None) == ("held_out_falls",)


def test_a_canary_needs_some_rewards_of_the_promoted_weights() -> None:
    """One that is right in 40 % passed in a fifth of 4,000 runs beside one reward of weights that are right in 80 %."""
    at = {"planned": 50, "spread": 1.0, "max_drop": 0.05}
    equal = np.ones(50)
    assert canary_verdict(equal, np.ones(LEAST_RATED - 1), over=False, **at) == ("wait", "")  # pyright: ignore[reportArgumentType]
    assert canary_verdict(equal, np.ones(LEAST_RATED - 1), over=True, **at) == ("roll_back", "canary_unrated")  # pyright: ignore[reportArgumentType]
    assert canary_verdict(equal, np.ones(LEAST_RATED), over=False, **at) == ("pass", "")  # pyright: ignore[reportArgumentType]
    few = at | {"planned": 4}
    assert canary_verdict(equal[:4], np.ones(4), over=False, **few) == ("pass", "")  # pyright: ignore[reportArgumentType]


def test_equal_scores_are_no_gain_and_one_task_tells_nothing() -> None:
    assert paired_gain([1.0, 0.0], [1.0, 0.0]) == Interval(0.0, 0.0, 0.0)
    assert paired_gain([0.0], [1.0]) == Interval(1.0, -math.inf, math.inf)


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 3.182446), (5, 2.570582), (10, 2.228139), (30, 2.042272), (1000, 1.962339)])
def test_the_quantiles_of_students_distribution_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert _student_quantile(degrees) == pytest.approx(quantile, rel=0.01)


def test_drift_is_the_divergence_by_enumeration() -> None:
    rng = np.random.default_rng(0)
    old, new = (np.log(rng.dirichlet(np.ones(7))) for _ in range(2))
    exact = float((np.exp(old) * (old - new)).sum())
    sampled = rng.choice(7, 200_000, p=np.exp(old))
    assert divergence(new[sampled], old[sampled]) == pytest.approx(exact, rel=0.02)
    assert divergence(old[sampled], old[sampled]) == 0.0
    assert divergence(np.zeros(0), np.zeros(0)) is None


def test_looking_after_every_reward_rolls_back_few_equal_canaries() -> None:
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        canary, stable = (rng.random(64) < 0.6).astype(float), (rng.random(576) < 0.6).astype(float)
        wrong += any(
            difference_bounds(canary[:count], stable[: 9 * count], spread=1.0, planned=32).high < 0 for count in range(1, len(canary) + 1)
        )
    assert wrong / 400 <= 0.05


def test_the_chance_of_a_wrong_roll_back_is_shared_among_the_steps() -> None:
    canary, stable = np.repeat([0.0, 1.0], [26, 6]), np.repeat([0.0, 1.0], [120, 168])
    at = {"over": False, "planned": 64, "spread": 1.0, "max_drop": 0.05}
    found = [canary_verdict(canary, stable, steps=steps, **at) for steps in (1, 10)]  # pyright: ignore[reportArgumentType]  # see `at`
    assert found == [("roll_back", "canary_worse"), ("wait", "")]


def test_a_bad_canary_is_rolled_back_before_the_planned_number_of_rewards() -> None:
    rng = np.random.default_rng(0)
    looks: list[int] = []
    for _ in range(100):
        canary, stable = (rng.random(64) < 0.05).astype(float), (rng.random(576) < 0.8).astype(float)
        for count in range(1, len(canary) + 1):
            verdict, why = canary_verdict(canary[:count], stable[: 9 * count], over=False, planned=64, spread=1.0, max_drop=0.05)
            if verdict != "wait":
                assert (verdict, why) == ("roll_back", "canary_worse")
                looks.append(count)
                break
    assert len(looks) == 100 and max(looks) <= 40


def test_a_step_of_a_canary_is_passed_once_it_has_its_rewards_and_rolled_back_without_them() -> None:
    good = np.ones(32)
    at = {"planned": 32, "spread": 1.0, "max_drop": 0.05}
    assert canary_verdict(good, good, over=False, **at) == ("pass", "")  # pyright: ignore[reportArgumentType]  # see `at`
    assert canary_verdict(good[:31], good, over=False, **at) == ("wait", "")  # pyright: ignore[reportArgumentType]
    assert canary_verdict(good[:31], good, over=True, **at) == ("roll_back", "canary_unrated")  # pyright: ignore[reportArgumentType]
    lower = np.repeat([0.0, 1.0], [2, 30])
    assert canary_verdict(lower, good, over=False, **at) == ("roll_back", "canary_no_gain")  # pyright: ignore[reportArgumentType]
    assert canary_verdict(good, np.zeros(0), over=False, **at) == ("wait", ""), "nothing to compare with"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("exploited", "expected"), [(0.0, 0.05), (0.5, 1.0)])
def test_the_alarm_of_an_exploited_reward(exploited: float, expected: float) -> None:
    """The share `exploited` of the attempts rewarded now is wrong in truth; the trained reward rises in both worlds."""
    rng, raised = np.random.default_rng(0), 0
    for _ in range(200):
        then, now = (rng.random(200) < chance for chance in (0.3, 0.9))
        truths = [then, now & ~((rng.random(200) < exploited) & now)]
        seen = [Rated(trained.astype(float), truth.astype(float)) for trained, truth in zip((then, now), truths, strict=True)]
        raised += trusted_lags(*seen)
    assert raised / 200 <= expected if not exploited else raised / 200 >= 0.95


def test_an_honest_rise_with_trusted_rewards_that_are_noisy_raises_no_alarm() -> None:
    rng, raised = np.random.default_rng(1), 0
    for _ in range(400):
        seen: list[Rated] = []
        for chance in (0.3, 0.8):
            trained = rng.random(150) < chance
            seen.append(Rated(trained.astype(float), (trained ^ (rng.random(150) < 0.1)).astype(float)))
        raised += trusted_lags(*seen)
    assert raised / 400 <= 0.08


def _estimate(low: float, high: float, *doubts: str) -> Estimate:
    gain = Interval((low + high) / 2, low, high)
    return Estimate(gain, gain, 0.0, 100, 90.0, 1.0, 0.1, doubts=doubts)


FLAT = Interval(0.0, -0.1, 0.1)
BETTER, WORSE, UNKNOWN = _estimate(0.1, 0.2), _estimate(-0.2, -0.1), _estimate(-0.1, 0.1, "overlap")


@pytest.mark.parametrize(
    ("rules", "given", "expected"),
    [
        (Rules(), {}, ()),
        (Rules(), {"held_out": Interval(-0.2, -0.3, -0.1)}, ("held_out_falls",)),
        (Rules(held_out="off"), {"held_out": Interval(-0.2, -0.3, -0.1)}, ()),
        (Rules(held_out="better"), {}, ("held_out_no_gain",)),
        (Rules(held_out="better"), {"held_out": Interval(0.2, 0.1, 0.3)}, ()),
        (Rules(), {"backtest": WORSE}, ("backtest_worse",)),
        (Rules(backtest="off"), {"backtest": WORSE}, ()),
        (Rules(backtest="better"), {"backtest": WORSE}, ("backtest_worse",)),
        (Rules(backtest="better"), {"backtest": UNKNOWN}, ("backtest_not_better",)),
        (Rules(backtest="better"), {"backtest": None}, ("backtest_not_better",)),
        (Rules(backtest="better"), {"backtest": BETTER}, ()),
        (Rules(max_drift=0.1), {"drift": 0.2}, ("drift",)),
        (Rules(max_drift=0.1), {"drift": float("nan")}, ("drift",)),
        (Rules(max_drift=0.1), {"drift": None}, ("drift_unknown",)),
        (Rules(), {"drift": None}, ()),
        (Rules(), {"trusted": WORSE}, ("trusted_falls",)),
        (Rules(), {"trusted": WORSE, "backtest": BETTER}, ("trusted_falls",)),
        (Rules(), {"trusted": _estimate(-0.2, 0.1), "backtest": BETTER}, ("trusted_stays",)),
        (Rules(), {"trusted": _estimate(-0.2, 0.1), "backtest": UNKNOWN}, ()),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(-0.2, 0.1), "backtest": BETTER}, ("trusted_stays",)),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(-0.06, 0.3), "backtest": BETTER}, ("trusted_unsure",)),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(-0.04, 0.3), "backtest": BETTER}, ()),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(-0.04, 0.04)}, ()),
        (Rules(max_trusted_drop=0.05), {"backtest": BETTER}, ("trusted_unsure",)),
        *[(Rules(max_trusted_drop=0.05), {"trusted": _estimate(0.1, 0.2, doubt)}, ("trusted_unsure",)) for doubt in sorted(UNSOUND)],
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(0.1, 0.2, "few_attempts", "overlap")}, ()),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(math.nan, math.nan), "backtest": BETTER}, ("trusted_unsure",)),
        (Rules(max_trusted_drop=0.05), {"trusted": _estimate(0.0, 0.0), "backtest": BETTER}, ("trusted_unsure",)),
        (Rules(), {"lags": True}, ("trusted_lags",)),
    ],
)
def test_what_a_gate_refuses(rules: Rules, given: dict[str, object], expected: tuple[str, ...]) -> None:
    facts: dict[str, object] = {"held_out": FLAT, "backtest": None, "trusted": None, "lags": False, "drift": 0.01, **given}
    assert refusals(rules, **facts) == expected  # pyright: ignore[reportArgumentType]  # the facts of the table
