"""The gradient of the weights compared with the reference loss in float64, for batches with special masks and empty rows."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from agl_otel.adapters.lengths import pick
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.objective import Objective
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.types.columns import Ragged

from .reference_loss import Row, reference_loss

pytestmark = pytest.mark.full

OPTIONS = {
    "plain": Objective(),
    "clip-higher": Objective(clip=0.05, clip_high=0.28),
    "dual-clip": Objective(dual_clip=1.5),
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


def reference_rows(model: Any, batch: TrajectoryBatch, advantages: Any, options: Objective) -> list[Row]:
    """Compute each trajectory's row separately with a model in float64."""
    rows: list[Row] = []
    columns: Any = zip(batch.prompt, batch.response, batch.response_mask, batch.logprobs, batch.rollout_id, advantages, strict=True)
    for prompt, response, mask, captured, rollout_id, advantage in columns:
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        every = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        written = np.flatnonzero(mask)
        new = [every[len(prompt) - 1 + int(place)] for place in written]
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
        wanted = reference_loss(reference_rows(exact, batch, advantages, options), options)
        wanted.backward()
        assert update.loss == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
        for (parameter, ours), (_, theirs) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
            assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6), (parameter, seed)
