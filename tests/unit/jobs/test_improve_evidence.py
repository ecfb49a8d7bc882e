"""What the attempts of a window say: which are kept from training for that, and between which bounds rewards lie."""

from __future__ import annotations

import pytest

from agl_otel.jobs.improve_evidence import HELD_BACK, bounds_of, held_back, is_backtested

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
