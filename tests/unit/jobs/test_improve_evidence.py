"""What a window's attempts say: which are kept from training for that, between which bounds rewards lie, and what a gate makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from agl_otel.adapters.gates import Rated, Rules
from agl_otel.jobs.improve_evidence import HELD_BACK, Evidence, bounds_of, held_back, is_backtested, judged_update

IDS = [f"ro-conversation-{number}" for number in range(2000)]


def test_without_trusted_rewards_one_attempt_in_four_is_held_back() -> None:
    found = held_back(IDS, ())
    assert found == [each for each in IDS if is_backtested(each)]
    assert len(found) / len(IDS) == pytest.approx(1 / HELD_BACK, abs=0.03)


def test_attempts_with_a_trusted_reward_are_held_back_too_and_in_order() -> None:
    trusted = IDS[10:200]
    found = held_back(IDS, [*reversed(trusted), "ro-of-another-window"])
    assert found == [each for each in IDS if each in set(trusted) or is_backtested(each)]


def test_half_is_trained_on_where_every_attempt_has_a_trusted_reward() -> None:
    found = held_back(IDS, IDS)
    assert len(found) / len(IDS) == pytest.approx(0.5, abs=0.03)
    assert set(found) >= {each for each in IDS if is_backtested(each)}


@pytest.mark.parametrize(
    ("rewards", "bounds"),
    [
        ([], (0.0, 1.0)),
        ([0.0, 1.0] * 10, (0.0, 1.0)),
        ([0.5] * 200 + [1e9], (0.0, 1.0)),
        ([0.0, 1.0] * 30 + [1e9, -1e9], (0.0, 1.0)),
        ([1.0] * 99 + [0.0], (0.0, 1.0)),
        ([0.0, 5.0], (0.0, 5.0)),
        ([2.0, 3.0, 3.0, 4.0], (0.0, 3.0)),
        ([1.0] * 10, (0.0, 1.0)),
        ([0.0] * 10, (0.0, 1.0)),
        ([5.0] * 10, (0.0, 5.0)),
        ([-1.0] * 10, (-1.0, 1.0)),
    ],
)
def test_the_range_of_rewards_is_without_outliers_and_never_a_point(rewards: list[float], bounds: tuple[float, float]) -> None:
    assert bounds_of(rewards) == pytest.approx(bounds)


EQUAL = [1.0, 0.0] * 8
FIRST = Rated(np.repeat([0.0, 1.0], 8), np.repeat([0.0, 1.0], 8))
LAGGING = Rated(np.ones(16), np.array([0.0, 1.0, 0.0, 0.0] * 4))
"""Trained rewards have risen to 1, and trusted ones, which were equal to them, have not."""


@pytest.mark.parametrize(
    ("rules", "after", "found", "first", "why"),
    [
        (Rules(), EQUAL, Evidence((0.0, 1.0)), None, []),
        (Rules(), [None] * 16, Evidence((0.0, 1.0)), None, ["held_out_falls"]),
        (Rules(held_out="off"), [None] * 16, Evidence((0.0, 1.0)), None, []),
        (Rules(held_out="better"), EQUAL, Evidence((0.0, 1.0)), None, ["held_out_no_gain"]),
        (Rules(held_out="better"), [1.0] * 16, Evidence((0.0, 1.0)), None, []),
        (Rules(backtest="better"), EQUAL, Evidence((0.0, 1.0)), None, ["backtest_not_better"]),
        (Rules(max_drift=0.5), EQUAL, Evidence((0.0, 1.0)), None, ["drift_unknown"]),
        (Rules(max_drift=0.5), EQUAL, Evidence((0.0, 1.0), drift=0.6), None, ["drift"]),
        (Rules(max_drift=0.5), EQUAL, Evidence((0.0, 1.0), drift=0.5), None, []),
        (Rules(max_trusted_drop=0.1), EQUAL, Evidence((0.0, 1.0)), None, ["trusted_unsure"]),
        (Rules(), EQUAL, Evidence((0.0, 1.0), rated=LAGGING), FIRST, ["trusted_lags"]),
        (Rules(), EQUAL, Evidence((0.0, 1.0), rated=LAGGING), None, []),  # the first cycle with both rewards: what others are held against
        (
            Rules(max_drift=0.5),
            [None] * 16,
            Evidence((0.0, 1.0), drift=0.6, rated=LAGGING),
            FIRST,
            ["held_out_falls", "drift", "trusted_lags"],
        ),
    ],
)
def test_a_gate_names_all_that_speaks_against_an_update(
    rules: Rules, after: Sequence[float | None], found: Evidence, first: Rated | None, why: list[str]
) -> None:
    assert judged_update(rules, before=EQUAL, after=after, found=found, first=first)["why"] == why


def test_a_gate_keeps_the_scores_in_which_a_missing_reward_is_0_and_the_evidence() -> None:
    found = Evidence((0.0, 2.0), drift=0.25, left_out={"no_reward": 3})
    gate = judged_update(Rules(), before=[1.0, None, 0.0, 1.0], after=[1.0, 1.0, None, 1.0], found=found, first=None)
    assert (gate["held_out"]["before"], gate["held_out"]["after"]) == (0.5, 0.75)
    assert gate["held_out"]["gain_low"] < 0.25 < gate["held_out"]["gain_high"]
    assert {name: gate[name] for name in found.as_json()} == found.as_json()


def test_one_held_out_task_says_nothing_of_a_gain() -> None:
    gate = judged_update(Rules(), before=[1.0], after=[0.0], found=Evidence((0.0, 1.0)), first=None)
    assert (gate["why"], gate["held_out"]["gain_low"], gate["held_out"]["gain_high"]) == ([], -np.inf, np.inf)


def test_an_outlier_does_not_hide_what_became_of_the_other_tasks() -> None:
    gates = [
        judged_update(Rules(), before=[1.0] * 50, after=after, found=Evidence((0.0, 1.0)), first=None)
        for after in ([0.5] * 50, [0.5] * 49 + [-100.0])
    ]
    assert [gate["why"] for gate in gates] == [["held_out_falls"]] * 2
    assert gates[1]["held_out"]["after"] == pytest.approx(-1.51), "the score itself is what it is"
