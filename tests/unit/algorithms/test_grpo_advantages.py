"""GRPO's advantages of a step's groups, and the trajectories that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import Group
from agl_otel.algorithms.grpo.options import Rollouts
from agl_otel.algorithms.report import Clock
from tests.unit.adapters.conftest import CallRow, TracesBuilder, reward

REWARDS = {"a-1": 1.0, "a-2": 0.0, "b-1": 0.5, "b-2": 0.5, "c-1": 9.0}
GROUPS = [Group(0, 1, ["a-1", "a-2"]), Group(1, 1, ["b-1", "b-2"]), Group(2, 1, ["c-1", "c-2"])]
CALLS = [CallRow(rollout="a-1", call=2, prompt=[9]), *(CallRow(rollout=rollout) for rollout in REWARDS)]
"""a-1 has two calls that do not continue each other; c-2 is missing."""


@pytest.mark.parametrize(("scaled", "expected"), [(True, 0.5**0.5), (False, 0.5)])
def test_all_trajectories_of_a_rollout_have_its_one_advantage(tmp_path: Path, scaled: bool, expected: float) -> None:
    """Computed by trajectory, the first group's mean would be 2/3."""
    grpo = GRPO.from_options(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", scale_advantages=scaled)
    traces = TracesBuilder(rewards={(rollout, "at-1"): [reward(value)] for rollout, value in REWARDS.items()}).build(*CALLS)
    private: Any = grpo
    read = private._score(traces, to_trajectories(traces), GROUPS, Clock())
    assert read.batch.rollout_id == ["a-1", "a-1", "a-2", "b-1", "b-2", "c-1"]
    assert read.advantages == pytest.approx(np.array([expected, expected, -expected, 0, 0, 0]), abs=1e-5)
    assert (read.zero_variance_groups, read.singleton_groups, [group.number for group in read.informative]) == (2, 1, [0])

    everything, _ = private._trained_on(read)
    grpo.rollouts = Rollouts(resample_rounds=1)  # dynamic sampling
    informative, advantages = private._trained_on(read)
    assert len(everything) == 6
    assert informative.rollout_id == ["a-1", "a-1", "a-2"] and advantages == pytest.approx(read.advantages[:3])
