from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
import torch

from agl_otel.algorithms.grpo.objective import group_advantages, max_ratio_error, surrogate_loss, token_logprobs


def test_advantages_by_hand() -> None:
    advantages = group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 1.0]), torch.tensor([0, 1, 0, 1, 0, 0]), epsilon=0.0)
    std = math.sqrt((0.5**2 * 4) / 3)
    assert advantages.tolist() == pytest.approx([0.5 / std, 0.0, -0.5 / std, 0.0, -0.5 / std, 0.5 / std])


def test_group_that_says_nothing_has_no_advantage() -> None:
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


def test_loss_equals_a_naive_loop_over_tokens_and_clips_both_ways() -> None:
    new = [math.log(p) for p in (0.5, 0.5, 0.1, 0.1, 0.3)]
    old = [math.log(p) for p in (0.25, 0.25, 0.2, 0.2, 0.3)]
    advantages = [1.0, -1.0, 1.0, -1.0, 2.0]
    terms: list[float] = []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(n - o)
        terms.append(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
    assert terms == pytest.approx([1.2, -2.0, 0.5, -0.8, 2.0])
    loss = surrogate_loss(torch.tensor(new), torch.tensor(old), torch.tensor(advantages), clip=0.2)
    assert loss.item() == pytest.approx(-sum(terms) / len(terms))


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.5)], requires_grad=True)
    surrogate_loss(logprobs, torch.tensor([math.log(0.25), math.log(0.5)]), torch.tensor([1.0, 1.0])).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5]


def test_token_logprobs_divide_by_the_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 3.0]])
    wanted = torch.log_softmax(logits / 0.7, -1)
    assert torch.allclose(token_logprobs(logits, torch.tensor([1, 2]), temperature=0.7), torch.stack([wanted[0, 1], wanted[1, 2]]))
    assert torch.allclose(token_logprobs(logits, torch.tensor([1, 2]), temperature=0.0)[0], torch.log_softmax(logits, -1)[0, 1])


def test_ratio_error_is_the_greatest_either_way() -> None:
    assert max_ratio_error(torch.tensor([0.0, math.log(0.9)]), torch.tensor([0.0, 0.0])) == pytest.approx(0.1)
    assert max_ratio_error(torch.zeros(0), torch.zeros(0)) == 0.0
