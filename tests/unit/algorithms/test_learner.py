from __future__ import annotations

import copy
import math
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.groups import TaskOrder
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.objective import Average, Objective, policy_loss, token_logprobs
from agl_otel.algorithms.grpo.policy import Policy, load_weights, save_weights
from agl_otel.errors import DataError, UsageError
from agl_otel.types.columns import Ragged

ROWS = [
    ([1, 4, 20], [30, 31, 9], [1, 1, 1]),
    ([1, 4], [40, 41, 42, 43, 44], [1, 0, 0, 1, 1]),
    ([1, 4, 20, 21], [50], [1]),
    ([1, 4, 20], [30, 31, 9], [1, 1, 1]),
]


def make_batch(policy: Policy, shift: float = 0.0, temperature: float = 1.0) -> TrajectoryBatch:
    """Make a batch of ROWS with the model's log-probs at this temperature, plus `shift`."""
    logprobs: list[list[float]] = []
    for prompt, response, mask in ROWS:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        plain = token_logprobs(logits, torch.tensor(response), temperature=temperature)
        logprobs.append([value + shift if written else 0.0 for value, written in zip(plain.tolist(), mask, strict=True)])
    return TrajectoryBatch(
        prompt=Ragged.from_rows([r[0] for r in ROWS], np.int32),
        response=Ragged.from_rows([r[1] for r in ROWS], np.int32),
        response_mask=Ragged.from_rows([r[2] for r in ROWS], np.int8),
        logprobs=Ragged.from_rows(logprobs, np.float32),
        reward=np.ones(len(ROWS), np.float32),
        rollout_id=["a", "b", "c", "d"],
        attempt_id=["1"] * 4,
        agent=[""] * 4,
        calls=np.ones(len(ROWS), np.int64),
        model_version=["1"] * 4,
        verdict=["complete"] * 4,
        images=[[] for _ in ROWS],
        rows=Ragged.from_rows([[row] for row in range(len(ROWS))], np.int64),
        refused=Counter(),
        breaks=Counter(),
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 14, 16384])
def test_update_is_one_step_on_the_mean_over_model_tokens(policy: Policy, micro_batch_tokens: int) -> None:
    advantages = np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    batch = make_batch(policy)
    model = copy.deepcopy(policy.model)
    learner = Learner(model, learning_rate=1e-3, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
    update = learner.update(batch, advantages)
    assert update.max_ratio_error < 1e-5
    assert update.tokens == 10

    plain = copy.deepcopy(policy.model)
    terms: list[torch.Tensor] = []
    for (prompt, response, mask), advantage in zip(ROWS, advantages.tolist(), strict=True):
        logits = plain(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = token_logprobs(logits, torch.tensor(response))
        for place, written in enumerate(mask):
            if written:
                one = logprobs[place : place + 1]
                terms.append(-torch.exp(one - one.detach()) * advantage)
    loss = torch.stack(terms).mean()
    loss.backward()
    assert update.loss == pytest.approx(loss.item(), abs=1e-5)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), name


def test_logprobs_of_another_model_are_reported_as_drift(policy: Policy) -> None:
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3)
    update = learner.update(make_batch(policy, shift=0.1), np.ones(len(ROWS), np.float32))
    assert update.max_ratio_error == pytest.approx(1 - math.exp(-0.1), abs=1e-4)


def test_logprobs_are_computed_at_the_sampling_temperature(policy: Policy) -> None:
    batch = make_batch(policy, temperature=0.5)
    found = [
        Learner(copy.deepcopy(policy.model), learning_rate=1e-3, temperature=at)
        .update(batch, np.ones(len(ROWS), np.float32))
        .max_ratio_error
        for at in (0.5, 1.0)
    ]
    assert found[0] < 1e-4 < 0.1 < found[1]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_all_updates_of_a_batch_use_the_same_old_logprobs(policy: Policy, cap: float | None) -> None:
    """The sampler's, or with importance_cap those of the initial weights. The SGD steps are so large that terms are clipped."""
    advantages, options = np.array([1.0, -0.5, 2.0, -3.0], np.float32), Objective(clip=0.05, importance_cap=cap)
    batch = make_batch(policy, shift=0.1)
    ours, plain = copy.deepcopy(policy.model), copy.deepcopy(policy.model)
    learner = Learner(ours, learning_rate=0.0, objective=options, updates=3, max_grad_norm=1e9)
    changed: Any = learner
    changed.optimizer, optimizer = (torch.optim.SGD(model.parameters(), lr=0.02) for model in (ours, plain))
    learner.update(batch, advantages)

    captured = torch.from_numpy(batch.logprobs.values[batch.response_mask.values == 1])
    spread = torch.from_numpy(np.repeat(advantages, [sum(mask) for *_, mask in ROWS]))
    sequence = torch.from_numpy(np.repeat(np.arange(len(ROWS)), [sum(mask) for *_, mask in ROWS]))
    frozen: torch.Tensor | None = None
    moved = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        now = torch.cat([written_logprobs(plain, *row) for row in ROWS])
        frozen = now.detach() if frozen is None else frozen
        moved = float((now.detach() - frozen).abs().max())
        old, weights = captured if cap is None else frozen, torch.full(now.shape, 1 / len(now))
        policy_loss(now, old, spread, weights, sequence, options, behaviour_logprobs=captured).backward()
        optimizer.step()
    assert moved > math.log(1.05), "later updates go beyond the clip"
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4), name


def written_logprobs(model: Any, prompt: list[int], response: list[int], mask: list[int]) -> torch.Tensor:
    """Compute the log-probs of the model's tokens by a forward pass over one row."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response))[torch.tensor(mask) == 1]


@pytest.mark.parametrize("average", ["token", "sequence", "rollout", "constant"])
def test_micro_batches_do_not_change_the_gradient(policy: Policy, average: Average) -> None:
    options = Objective(average=average, constant_tokens=8, sequence_ratio=True, importance_cap=2.0, kl=0.1)
    found: list[list[torch.Tensor]] = []
    for tokens in (1, 16384):
        model = copy.deepcopy(policy.model)
        learner = Learner(model, learning_rate=1e-2, objective=options, max_grad_norm=1e9, micro_batch_tokens=tokens)
        learner.update(make_batch(policy, shift=0.3), np.array([1.0, -0.5, 2.0, -3.0], np.float32))
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))


def test_the_kl_term_keeps_the_weights_near_the_initial_ones(policy: Policy) -> None:
    advantages = np.array([1.0, -0.5, 2.0, -3.0], np.float32)
    drift: list[float] = []
    for kl in (0.001, 10.0):
        learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3, objective=Objective(kl=kl), updates=6)
        drift.append(learner.update(make_batch(policy), advantages).kl)
    assert 0 < drift[1] < drift[0]


def test_an_advantage_that_is_not_finite_is_refused(policy: Policy) -> None:
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3)
    with pytest.raises(DataError, match="1 of 4 advantages"):
        learner.update(make_batch(policy), np.array([1.0, math.nan, 0.0, 0.0], np.float32))
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), policy.model.parameters(), strict=True))


def test_weights_survive_a_round_trip(policy: Policy, tmp_path: Path) -> None:
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    folder = save_weights(model, tmp_path / "new")
    target = copy.deepcopy(policy.model)
    load_weights(target, folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), target.parameters(), strict=True))


def test_weights_of_another_shape_are_refused_without_changing_the_model(policy: Policy, tmp_path: Path) -> None:
    state = {name: tensor + 1 for name, tensor in policy.model.state_dict().items()}
    name = next(iter(state))
    before = policy.model.state_dict()[name].clone()
    with pytest.raises(UsageError, match="cannot read weights"):
        load_weights(policy.model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot read weights"):
        load_weights(policy.model, tmp_path)
    for wrong, words in (
        ({**state, name: state[name][:1].clone()}, "has shape"),
        ({key: value for key, value in state.items() if key != name}, "lacks 1 weights"),
        ({**state, "extra": torch.zeros(1)}, "has 1 weights that the model lacks"),
    ):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=words):
            load_weights(policy.model, tmp_path)
    assert torch.equal(policy.model.state_dict()[name], before)


def test_every_task_is_used_once_before_any_is_repeated() -> None:
    drawn = list(islice(TaskOrder(5, random.Random(0)), 30))
    assert all(sorted(drawn[start : start + 5]) == list(range(5)) for start in range(0, 30, 5))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"group_size": 1}, "compared within a group"),
        ({"resample_rounds": -1}, "resample_rounds = -1"),
        ({"max_staleness": -1}, "max_staleness = -1"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps = 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0"),
        ({"groups_in_flight": 16}, "greater than prompts_per_step"),
        ({"average": "constant"}, "constant_tokens"),
    ],
)
def test_invalid_options_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GRPO.from_options(model_dir="policy", model_server_url="http://127.0.0.1:1", **wrong)
