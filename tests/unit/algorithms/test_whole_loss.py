"""Gradients and steps compared with the reference loss in float64, for batches with special masks and empty rows."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from agl_otel.adapters.lengths import pick
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.lora import adapter, with_lora
from agl_otel.algorithms.grpo.options import Objective
from agl_otel.algorithms.grpo.policy import Policy, checkpoint_activations
from agl_otel.types.columns import Ragged

from .reference_loss import Row, reference_loss

pytestmark = pytest.mark.full

OPTIONS = {
    "plain": Objective(),
    "clip-higher": Objective(clip=0.05, clip_high=0.28),
    "dual-clip": Objective(dual_clip=1.5),
    "cispo": Objective(weight_cap=1.05, kl=0.1),
    "gspo": Objective(sequence_ratio=True, average="sequence", clip=0.05),
    "dr-grpo": Objective(average="constant", constant_tokens=7),
    "per-rollout": Objective(average="rollout"),
    "stale": Objective(importance_cap=0.9, average="rollout"),
    "all": Objective(clip_high=0.28, dual_clip=3.0, sequence_ratio=True, average="rollout", importance_cap=2.0, kl=0.1),
    "kl": Objective(kl=0.1),
}
LENGTHS = (0, 1, 1, 2, 3, 5)


def random_batch(source: random.Random) -> TrajectoryBatch:
    """Make nine trajectories of four rollouts, of which three are dropped: empty responses, single tokens, masks with gaps or all 0."""
    sizes = [source.choice(LENGTHS) for _ in range(8)] + [5]
    masks = [[source.randrange(2) for _ in range(size)] for size in sizes[:-1]] + [[1, 0, 0, 1, 1]]
    batch = TrajectoryBatch(
        prompt=Ragged.from_rows([[1, *(source.randrange(4, 60) for _ in range(source.randrange(4)))] for _ in sizes], np.int32),
        response=Ragged.from_rows([[source.randrange(4, 60) for _ in range(size)] for size in sizes], np.int32),
        response_mask=Ragged.from_rows(masks, np.int8),
        logprobs=Ragged.from_rows([[source.uniform(-5, -3) if written else 0.0 for written in mask] for mask in masks], np.float32),
        reward=np.ones(len(sizes), np.float32),
        rollout_id=[f"ro-{source.randrange(4)}" for _ in sizes],
        attempt_id=["1"] * len(sizes),
        agent=[""] * len(sizes),
        calls=np.ones(len(sizes), np.int64),
        model_version=["1"] * len(sizes),
        verdict=["complete"] * len(sizes),
        images=[[] for _ in sizes],
        rows=Ragged.from_rows([[row] for row in range(len(sizes))], np.int64),
        refused=Counter(),
        breaks=Counter(),
    )
    return pick(batch, np.sort(np.array([*source.sample(range(8), 5), 8])))


def logits_of(model: Any, ids: Any) -> Any:
    return model(input_ids=ids).logits


def reference_rows(
    logits: Callable[[Any], Any], batch: TrajectoryBatch, advantages: Any, options: Objective, temperatures: Ragged | None = None
) -> list[Row]:
    """Compute each trajectory's row separately with a model in float64, whose `logits` of token ids [1, tokens] are given."""
    rows: list[Row] = []
    columns: Any = zip(batch.prompt, batch.response, batch.response_mask, batch.logprobs, batch.rollout_id, advantages, strict=True)
    for number, (prompt, response, mask, captured, rollout_id, advantage) in enumerate(columns):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        written = np.flatnonzero(mask)
        scales = [1.0] * len(written) if temperatures is None else temperatures[number].tolist()
        found = logits(ids)[0]
        new = [
            torch.log_softmax(found[len(prompt) + place - 1] / scale, -1)[int(response[place])]
            for place, scale in zip(written.tolist(), scales, strict=True)
        ]
        now, behaviour = [float(each.detach()) for each in new], captured[written].tolist()
        rows.append(Row(rollout_id, new, now if options.importance_cap is not None else behaviour, behaviour, now, float(advantage)))
    return rows


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_equals_that_of_the_reference_loss(policy: Policy, name: str) -> None:
    options = OPTIONS[name]
    for seed in range(2):
        source = random.Random(f"{name}/{seed}")
        batch = random_batch(source)
        advantages = np.array([source.uniform(-2, 2) for _ in range(len(batch))], np.float32)
        model = copy.deepcopy(policy.model)
        update = Learner(model, learning_rate=1e-3, objective=options, max_grad_norm=1e9, micro_batch_tokens=20).update(batch, advantages)
        exact = copy.deepcopy(policy.model).double()
        wanted = reference_loss(reference_rows(partial(logits_of, exact), batch, advantages, options), options)
        wanted.backward()
        assert update.loss == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
        for (parameter, ours), (_, theirs) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
            assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6), (parameter, seed)


RATE = 1.0
STEPS: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 1e9},
    "micro-batches": {"max_grad_norm": 1e9, "micro_batch_tokens": 20},
    "several": {"max_grad_norm": 1e9, "updates": 2, "minibatches": 2},
    "uneven": {"max_grad_norm": 1e9, "updates": 2, "minibatches": 4, "micro_batch_tokens": 1},
    "lora": {"max_grad_norm": 1e9},
    "checkpointed": {"max_grad_norm": 1e9},
    "temperatures": {"max_grad_norm": 1e9},
    "clipped": {"max_grad_norm": 0.5},
}


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_a_learner_are_those_made_by_hand_in_float64(policy: Policy, name: str) -> None:
    """All weights after steps of SGD to 1e-6: log-probs, norms and rotations are float32 in any case. With LoRA, W + (alpha / r) B A."""
    source = random.Random(name)
    batch = random_batch(source)
    advantages = np.array([source.uniform(-2, 2) for _ in range(len(batch))], np.float32)
    counts = [int(np.sum(mask)) for mask in batch.response_mask]
    temperatures = Ragged.from_rows([[source.uniform(0.5, 1.5) for _ in range(count)] for count in counts], np.float32)
    given = temperatures if name == "temperatures" else None

    model, plain = (copy.deepcopy(policy.model).double() for _ in range(2))
    weights: dict[str, Any] = dict(plain.named_parameters())
    logits: Callable[[Any], Any] = partial(logits_of, plain)
    if name == "lora":
        model = with_random_adapter(model)
        weights = {key: tensor.detach().clone().requires_grad_() for key, tensor in (adapter(model) or {}).items()}
        logits = partial(merged_logits, plain, weights)
    if name == "checkpointed":
        checkpoint_activations(model)
    learner = Learner(model, learning_rate=0.0, objective=Objective(clip=0.05), **STEPS[name])
    changed: Any = learner
    changed.optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=RATE)
    torch.manual_seed(5)
    learner.update(batch, advantages, temperatures=given)

    torch.manual_seed(5)
    parts = [np.arange(len(batch))]
    if learner.minibatches > 1:
        parts = [np.sort(index) for index in np.array_split(torch.randperm(len(batch)).numpy(), learner.minibatches)]
    before = {key: tensor.detach().clone() for key, tensor in weights.items()}
    for _ in range(learner.updates):
        for index in parts:
            if not any(batch.response_mask[row].any() for row in index.tolist()):
                continue  # the gradient of no token is 0
            of_part = None if given is None else Ragged.from_rows([given[row].tolist() for row in index.tolist()], np.float32)
            rows = reference_rows(logits, pick(batch, index), advantages[index], learner.objective, of_part)
            gradients = torch.autograd.grad(reference_loss(rows, learner.objective), list(weights.values()))
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            with torch.no_grad():
                for weight, gradient in zip(weights.values(), gradients, strict=True):
                    weight -= RATE * gradient * min(1.0, learner.max_grad_norm / (float(norm) + 1e-6))
    trained: dict[str, Any] = {name.replace(".default.", "."): weight for name, weight in model.named_parameters()}  # PEFT's names
    moved = {key: float((tensor.detach() - before[key]).abs().max()) for key, tensor in weights.items()}
    assert max(moved.values()) > 1e-3
    for key, tensor in weights.items():
        assert torch.allclose(trained[key], tensor, rtol=0, atol=1e-6), key


def merged_logits(plain: Any, adapter: dict[str, Any], ids: Any) -> Any:
    """Compute the logits of a model with W + (alpha / r) B A in place of each W."""
    own: dict[str, Any] = dict(plain.named_parameters())
    scaled = {
        stem: own[f"{stem}.weight"].detach() + 3.0 / 2 * adapter[name.replace("lora_A", "lora_B")] @ tensor
        for name, tensor in adapter.items()
        if ".lora_A" in name
        for stem in [name.removeprefix("base_model.model.").partition(".lora_")[0]]
    }
    return torch.func.functional_call(plain, {f"{stem}.weight": tensor for stem, tensor in scaled.items()}, (ids,)).logits


def with_random_adapter(model: Any) -> Any:
    """Add an adapter of rank 2 and alpha 3 whose B is not 0, so that A has a gradient."""
    pytest.importorskip("peft", reason="needs the [lora] extra")
    torch.manual_seed(7)
    model = with_lora(model, 2, alpha=3.0).double()
    for name, weight in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def test_in_bfloat16_the_gradient_is_that_of_float64_to_a_tenth(policy: Policy) -> None:
    """bfloat16 has 8 bits: the loss is off by less than 0.05, and each weight's gradient by less than a tenth of its norm."""
    source = random.Random(11)
    batch = random_batch(source)
    advantages = np.array([source.uniform(-2, 2) for _ in range(len(batch))], np.float32)
    model, exact = copy.deepcopy(policy.model), copy.deepcopy(policy.model).double()
    options = Objective(importance_cap=2.0)
    learner = Learner(model, learning_rate=0.0, objective=options, max_grad_norm=1e9, compute_dtype=torch.bfloat16)
    update = learner.update(batch, advantages)
    wanted = reference_loss(reference_rows(partial(logits_of, exact), batch, advantages, options), options)
    wanted.backward()
    assert update.loss == pytest.approx(wanted.item(), abs=0.05)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert (ours.grad.double() - theirs.grad).norm() < 0.1 * theirs.grad.norm() + 1e-4, name
