"""The scores of a candidate's rollouts, without a store."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from agl_otel.algorithms.prompts.evaluate import Evaluation, final_rewards
from agl_otel.types import Attempt, AttemptedRollout
from agl_otel.types.columns import CallColumns, Ragged, Reward, Traces

NONE = np.zeros(0, np.int64)
ROWS = Ragged.from_rows([], np.int32)
NO_CALLS = CallColumns(
    [], [], [], [], [], NONE, NONE, NONE.astype(np.uint64), NONE, NONE, ROWS, ROWS, ROWS, [], [], [], NONE.astype(np.float64), []
)


def traces(rewards: dict[tuple[str, str], list[tuple[int, int, float]]]) -> Traces:
    """Make traces of succeeded rollouts: {(rollout, attempt): [(sequence, index, value)]}; the last attempt of each is its latest."""
    made = {key: [Reward(sequence, "s", index, "r", value) for sequence, index, value in found] for key, found in rewards.items()}
    latest = {
        rollout_id: Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0)
        for rollout_id, attempt_id in rewards
    }
    rollouts = [AttemptedRollout(rollout_id=name, input=None, start_time=0.0, attempt=attempt) for name, attempt in latest.items()]
    return Traces(rollouts=[*rollouts], calls=NO_CALLS, rewards=made, verdicts={})


def test_the_last_primary_reward_of_the_latest_attempt_counts() -> None:
    """Training reads the latest attempt: an earlier one's reward is none of it, whatever came last; nor is what follows the runner's."""
    found = final_rewards(
        traces(
            {
                ("a", "1"): [(1, 0, 0.1), (3, 0, 0.3), (4, 1, 9.0)],
                ("a", "2"): [(7, 0, 0.7), (7, 1, 9.0)],
                ("b", "1"): [(2, 1, 9.0)],
                ("lost", "1"): [(1, 0, 1.0)],
                ("lost", "2"): [],
                ("late", "1"): [(9, 0, 1.0)],
                ("late", "2"): [(5, 0, 0.25)],
                ("graded", "1"): [(8, 0, 1.0), (3, 0, 0.5)],
            }
        )
    )
    assert found == {"a": 0.7, "late": 0.25, "graded": 0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e10])
def test_a_reward_that_training_refuses_counts_as_none_and_is_logged(value: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert final_rewards(traces({("a", "1"): [(1, 0, value)], ("b", "1"): [(1, 0, 0.5)]})) == {"b": 0.5}
    assert "the reward of rollout a is" in caplog.text


def test_unfinished_rollouts_and_missing_rewards_count_as_zero() -> None:
    evaluation = Evaluation(["a", "b", "c", "d"], ["succeeded", "failed", None, "succeeded"], [1.0, None, None, None])
    assert evaluation.score == 0.25 and evaluation.per_task == [1.0, 0.0, 0.0, 0.0]
    assert Evaluation(["a"], [None], [None]).score == 0.0
