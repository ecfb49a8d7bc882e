"""GRPO's advantages of a step's groups, and the trajectories that are trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import Group
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.options import Rollouts
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.algorithms.report import Clock
from agl_otel.errors import UsageError
from agl_otel.types.columns import Ragged, Traces
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
    assert read.scored.advantages == pytest.approx(np.array([expected, expected, -expected, 0, 0, 0]), abs=1e-5)
    assert (read.zero_variance_groups, read.singleton_groups, [group.number for group in read.informative]) == (2, 1, [0])

    everything, _ = private._trained_on(read)
    grpo.rollouts = Rollouts(resample_rounds=1)  # dynamic sampling
    informative, advantages = private._trained_on(read)
    assert len(everything) == 6
    assert informative.rollout_id == ["a-1", "a-1", "a-2"] and advantages == pytest.approx(read.scored.advantages[:3])


def before_credit(rewards: Tensor, groups: Tensor, scaled: bool) -> Tensor:
    """Compute the advantages as GRPO did before calls had any of their own; kept here to compare bits with."""
    count = torch.bincount(groups).to(rewards.dtype)
    zeros = torch.zeros(len(count), dtype=rewards.dtype)
    centred = rewards - (zeros.index_add(0, groups, rewards) / count.clamp(min=1))[groups]
    std = (zeros.index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    relative = centred / (std[groups] + 1e-6) if scaled else centred
    return torch.where((highest > lowest)[groups], relative, torch.zeros_like(rewards))


def attempts(seed: int) -> tuple[Traces, list[Group]]:
    """Make rollouts with one final reward each and some calls, of which only the first has a prompt that others have, too."""
    source = np.random.default_rng(seed)
    rows: list[CallRow] = []
    rewards: dict[tuple[str, str], Any] = {}
    groups: list[Group] = []
    for number in range(int(source.integers(1, 9))):
        ids = [f"{number}-{member}" for member in range(int(source.integers(1, 12)))]
        groups.append(Group(number, 1, ids))
        for place, rollout in enumerate(ids):
            value = float(source.standard_normal() if source.random() < 0.5 else source.integers(0, 3))
            rewards[rollout, "at-1"] = [reward(value, sequence=1_000_000)]
            for call in range(int(source.integers(1, 6))):
                prompt = [9, number] if not call else [8, number, place, call]
                rows.append(CallRow(rollout=rollout, call=call + 1, prompt=prompt, response=[7] * int(source.integers(1, 4))))
    return TracesBuilder(rewards=rewards).build(*rows), groups


def grpo_of(tmp_path: Path, **options: Any) -> Any:
    return GRPO.from_options(model_dir=tmp_path, model_server_url="http://127.0.0.1:1", **options)


RULES: list[dict[str, Any]] = [
    {"credit": "to_go"},
    {"credit": "states"},
    {"agent_baselines": True},
    {"credit": "states", "agent_baselines": True},
]
"""Of calls; all but the default."""


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_with_a_final_reward_alone_every_rule_is_grpo_to_the_last_bit(tmp_path: Path, scaled: bool, shuffled: bool) -> None:
    for seed in range(40):
        traces, groups = attempts(seed)
        batch = to_trajectories(traces)
        options: dict[str, Any] = {"scale_advantages": scaled, "shuffle_rewards": shuffled}
        read = grpo_of(tmp_path, **options)._score(traces, batch, groups, Clock())
        for rule in RULES:
            by_call = grpo_of(tmp_path, **options, **rule)._score(traces, batch, groups, Clock())
            assert of_tokens(by_call).tobytes() == of_tokens(read).tobytes()
            assert by_call.scored.matched_states in (None, 0.0)
        if not shuffled:
            group_of = {rollout: group.number for group in groups for rollout in group.rollout_ids}
            ids = list(dict.fromkeys(read.batch.rollout_id))
            rewards = torch.tensor([traces.rewards[rollout, "at-1"][0].value for rollout in ids], dtype=torch.float32)
            expected = before_credit(rewards, torch.tensor([group_of[each] for each in ids]), scaled).numpy()
            assert read.scored.advantages.tobytes() == expected[[ids.index(each) for each in read.batch.rollout_id]].tobytes()


def of_tokens(read: Any) -> Any:
    advantages = read.scored.advantages
    if isinstance(advantages, Ragged):
        return advantages.values
    return np.repeat(advantages, [int((read.batch.response_mask[row] == 1).sum()) for row in range(len(read.batch))])


@pytest.fixture
def learners(policy: Policy) -> tuple[Learner, Learner]:
    first, second = (Learner(copy.deepcopy(policy.model), learning_rate=1e-3, updates=2, minibatches=2) for _ in range(2))
    return first, second


def test_a_whole_update_by_calls_is_grpos_to_the_last_bit(tmp_path: Path, learners: tuple[Learner, Learner]) -> None:
    traces, groups = attempts(3)
    weights: list[bytes] = []
    for learner, rule in zip(learners, ("final", "states"), strict=True):
        torch.manual_seed(1)
        read = grpo_of(tmp_path, credit=rule)._score(traces, to_trajectories(traces), groups, Clock())
        assert isinstance(read.scored.advantages, Ragged) == (rule == "states")
        assert learner.update(read.batch, read.scored.advantages).made == 4
        weights.append(b"".join(each.detach().numpy().tobytes() for each in learner.model.parameters()))
    assert weights[0] == weights[1]


def test_each_token_is_weighted_with_the_advantage_of_its_call(learners: tuple[Learner, Learner]) -> None:
    """One trajectory of two calls learns what the same calls learn as two trajectories, in which the second has the rest as its prompt."""
    joined, apart = learners
    rows = [
        CallRow(rollout="a", call=1, prompt=[1], response=[30, 31]),
        CallRow(rollout="a", call=2, prompt=[1, 30, 31, 20], response=[32]),
    ]
    rewards = {("a", "at-1"): [reward(1.0, sequence=1), reward(3.0, sequence=9)]}
    traces = TracesBuilder(rewards=rewards).build(*rows)
    batch = to_trajectories(traces)
    assert len(batch) == 1
    joined.minibatches = apart.minibatches = 1
    joined.update(batch, Ragged(np.array([-1, -1, 2], np.float32), np.array([0, 3])))
    apart.update(to_trajectories(traces, by_call=True), np.array([-1, 2], np.float32))
    for ours, theirs in zip(joined.model.parameters(), apart.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_rewards_of_steps_are_compared_at_the_same_step(tmp_path: Path) -> None:
    rows = [CallRow(rollout=rollout, call=call, prompt=[call]) for rollout in ("a", "b") for call in (1, 2)]
    steps = {"a": (1.0, 0.0), "b": (0.0, 0.0)}
    numbers = {"a": (1, 2), "b": (3, 4)}  # those of the calls, as the columns have them
    rewards = {
        (rollout, "at-1"): [reward(value, sequence=number) for value, number in zip(steps[rollout], (numbers[rollout][1], 9), strict=True)]
        for rollout in steps
    }
    traces = TracesBuilder(rewards=rewards).build(*rows)
    grpo = grpo_of(tmp_path, credit="to_go", scale_advantages=False)
    read = grpo._score(traces, to_trajectories(traces), [Group(0, 1, ["a", "b"])], Clock())
    assert [read.scored.advantages[row].tolist() for row in range(4)] == [[0.5, 0.5], [0, 0], [-0.5, -0.5], [0, 0]]
    assert read.scored.learns.tolist() == [True, False, True, False] and read.of_informative.all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"credit": "togo"}, r'credit = "togo": it must be one of final, to_go, states, or a function'),
        ({"credit": ":name"}, "must be one of final"),
        ({"discount": 0.9}, 'discount = 0.9 has no effect with credit = "final"'),
        ({"credit": "a.py:f", "discount": 0.9}, "discount = 0.9 has no effect"),
        ({"credit": "to_go", "discount": 1.5}, "discount = 1.5: it must be at least 0 and at most 1"),
        ({"credit": "to_go", "state_weight": 0.5}, "state_weight = 0.5 has no effect"),
        ({"credit": "states", "sequence_ratio": True}, "gives its calls the same credit"),
        ({"credit": "nowhere.py:f"}, "there is no file"),
    ],
)
def test_options_of_credit_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        grpo_of(tmp_path, **options)
