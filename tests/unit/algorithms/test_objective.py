from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.algorithms.grpo.objective import (
    group_advantages,
    max_ratio_error,
    policy_loss,
    token_logprobs,
    token_weights,
)
from agl_otel.algorithms.grpo.options import Objective
from agl_otel.errors import UsageError

from .reference_loss import Row, reference_loss


def test_advantages_of_a_worked_example() -> None:
    advantages = group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 1.0]), torch.tensor([0, 1, 0, 1, 0, 0]), epsilon=0.0)
    std = math.sqrt((0.5**2 * 4) / 3)
    assert advantages.tolist() == pytest.approx([0.5 / std, 0.0, -0.5 / std, 0.0, -0.5 / std, 0.5 / std])


def test_a_zero_variance_group_has_no_advantage() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 2, 2]))
    assert advantages[:4].tolist() == [0.0] * 4
    assert advantages[4] > 0 > advantages[5]


def test_advantages_equal_a_naive_loop() -> None:
    source = random.Random(1)
    rewards = [source.random() for _ in range(200)]
    groups = [source.randrange(30) for _ in range(200)]
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    wanted: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        mean = sum(members[group]) / len(members[group])
        variance = sum((r - mean) ** 2 for r in members[group]) / max(1, len(members[group]) - 1)
        wanted.append((reward - mean) / (math.sqrt(variance) + 1e-6))
    assert group_advantages(torch.tensor(rewards), torch.tensor(groups)).tolist() == pytest.approx(wanted, abs=1e-4)


def test_unscaled_advantages_of_a_worked_example() -> None:
    advantages = group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 1.0]), torch.tensor([0, 1, 0, 1, 0, 0]), scaled=False)
    assert advantages.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.5]


def simple_loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, options: Objective | None = None) -> torch.Tensor:
    options = options or Objective()
    sequence = torch.arange(len(logprobs))
    return policy_loss(logprobs, old, advantages, token_weights(sequence, sequence, options), sequence, options)


def test_ratios_are_clipped_on_both_sides() -> None:
    new = torch.tensor([0.5, 0.5, 0.1, 0.1, 0.3]).log()
    old = torch.tensor([0.25, 0.25, 0.2, 0.2, 0.3]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    assert simple_loss(new, old, advantages).item() == pytest.approx(-(1.2 - 2.0 + 0.5 - 0.8 + 2.0) / 5)
    assert simple_loss(new, old, advantages, Objective(clip_high=0.5)).item() == pytest.approx(-(1.5 - 2.0 + 0.5 - 0.8 + 2.0) / 5)
    assert simple_loss(new, old, advantages, Objective(dual_clip=1.5)).item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.0) / 5)


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.5)], requires_grad=True)
    simple_loss(logprobs, torch.tensor([math.log(0.25), math.log(0.5)]), torch.tensor([1.0, 1.0])).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5]


def test_cispo_of_a_worked_example_bounds_weights_and_leaves_every_token_its_gradient() -> None:
    new = torch.tensor([0.5, 0.5, 0.1, 0.1, 0.3], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([0.25, 0.25, 0.2, 0.2, 0.3], dtype=torch.float64).log()  # ratios 2, 2, 1/2, 1/2, 1
    advantages = torch.tensor([1.0, -2.0, 1.0, -3.0, 2.0], dtype=torch.float64)
    mean, sequence = torch.full((5,), 0.2, dtype=torch.float64), torch.arange(5)
    loss = policy_loss(new, old, advantages, mean, sequence, Objective(weight_cap=1.5))
    half, tenth = math.log(0.5), math.log(0.1)
    assert loss.item() == pytest.approx(-(1.5 * half - 3.0 * half + 0.5 * tenth - 1.5 * tenth + 2.0 * math.log(0.3)) / 5, rel=1e-12)
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.3, 0.6, -0.1, 0.3, -0.4], rel=1e-12)


_OF_BOTH: dict[str, Any] = {"importance_cap": st.sampled_from([None, 0.9, 2.0]), "kl": st.sampled_from([0.0, 0.1])}
_OF_CISPO: dict[str, Any] = {"weight_cap": st.sampled_from([1.05, 5.0]), "average": st.sampled_from(["token", "rollout"])}
_OF_SURROGATE: dict[str, Any] = {
    "clip": st.sampled_from([0.05, 0.2]),
    "clip_high": st.sampled_from([None, 0.28]),
    "dual_clip": st.sampled_from([None, 1.5, 3.0]),
    "sequence_ratio": st.booleans(),
    "average": st.sampled_from(["token", "sequence", "rollout"]),
}
_BY_ROWS = st.builds(Objective, **_OF_CISPO, **_OF_BOTH) | st.builds(Objective, **_OF_SURROGATE, **_OF_BOTH)
OPTIONS = _BY_ROWS | _BY_ROWS.map(lambda options: replace(options, average="constant", constant_tokens=7))
# lengths of the trajectories of each rollout: empty ones and single tokens among them
LENGTHS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4).filter(lambda rows: any(map(sum, rows)))


def test_every_option_of_the_loss_is_compared_with_the_reference() -> None:
    """All but scale_advantages, which is of the advantages that the loss is given."""
    compared = {*_OF_BOTH, *_OF_CISPO, *_OF_SURROGATE, "constant_tokens"}
    assert {each.name for each in fields(Objective)} - compared == {"scale_advantages"}


@given(options=OPTIONS, lengths=LENGTHS, seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_losses_and_gradients_equal_the_reference(options: Objective, lengths: list[list[int]], seed: int) -> None:
    source = random.Random(seed)
    batch: list[Row] = []
    leaves: list[torch.Tensor] = []
    for rollout, rows in enumerate(lengths):
        advantage = source.uniform(-2, 2)
        for length in rows:
            new = [torch.tensor(source.uniform(-4, -0.01), dtype=torch.float64, requires_grad=True) for _ in range(length)]
            near = [[float(value.detach()) + source.gauss(0, 0.3) for value in new] for _ in range(3)]
            leaves += new
            batch.append(Row(f"ro-{rollout}", new, near[0], near[1], near[2], advantage))
    wanted = reference_loss(batch, options)
    wanted.backward()

    def flat(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    sequence = torch.tensor([place for place, row in enumerate(batch) for _ in row.new], dtype=torch.int64)
    rollout = torch.tensor([place for place, rows in enumerate(lengths) for _ in rows], dtype=torch.int64)
    logprobs = torch.stack([leaf.detach() for leaf in leaves]).requires_grad_()
    advantages = torch.tensor([row.advantage for row in batch for _ in row.new], dtype=torch.float64)
    weights = token_weights(sequence, rollout, options).double()
    old, behaviour, reference = (flat([getattr(row, name) for row in batch]) for name in ("old", "behaviour", "reference"))
    loss = policy_loss(logprobs, old, advantages, weights, sequence, options, behaviour_logprobs=behaviour, reference_logprobs=reference)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-7)
    assert logprobs.grad is not None
    gradients = [leaf.grad.item() for leaf in leaves if leaf.grad is not None]
    assert logprobs.grad.tolist() == pytest.approx(gradients, rel=1e-5, abs=1e-7)


def test_a_rollouts_weight_is_independent_of_its_number_of_trajectories() -> None:
    sequence = torch.tensor([0, 0, 1, 1, 1, 2])
    weights = token_weights(sequence, torch.tensor([0, 0, 1]), Objective(average="rollout"))
    assert weights.tolist() == pytest.approx([1 / 15] * 5 + [1 / 3])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"clip": 0.0}, "clip = 0.0"),
        ({"dual_clip": 1.0}, "at least 1.01"),
        ({"weight_cap": 1.0}, "weight_cap = 1.0: it must be at least 1.01"),
        ({"weight_cap": 5.0, "clip": 0.1}, "weight_cap = 5 and clip = 0.1: clip is of the clipped surrogate"),
        ({"weight_cap": 5.0, "sequence_ratio": True}, "weight_cap = 5 and sequence_ratio = True"),
        ({"average": "constant"}, "constant_tokens"),
        ({"kl": -1.0}, "kl = -1.0"),
    ],
)
def test_invalid_options_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Objective(**wrong)


def test_token_logprobs_divide_by_the_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 3.0]])
    wanted = torch.log_softmax(logits / 0.7, -1)
    assert torch.allclose(token_logprobs(logits, torch.tensor([1, 2]), temperature=0.7), torch.stack([wanted[0, 1], wanted[1, 2]]))
    assert torch.allclose(token_logprobs(logits, torch.tensor([1, 2]), temperature=0.0)[0], torch.log_softmax(logits, -1)[0, 1])


def test_ratio_error_is_the_largest_in_either_direction() -> None:
    assert max_ratio_error(torch.tensor([0.0, math.log(0.9)]), torch.tensor([0.0, 0.0])) == pytest.approx(0.1)
    assert max_ratio_error(torch.zeros(0), torch.zeros(0)) == 0.0
