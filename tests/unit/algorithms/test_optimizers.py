"""Optimizers by name: their steps, their states in checkpoints, and what is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.checkpoint import Checkpoints
from agl_otel.algorithms.grpo.learner import Learner
from agl_otel.algorithms.grpo.optimizers import OptimizerName, make_optimizer
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.errors import SettingsError, UsageError
from tests.unit.algorithms.test_checkpoint import ADVANTAGES, state
from tests.unit.algorithms.test_learner import make_batch

MODEL: dict[str, Any] = {"model_dir": "policy", "model_server_url": "http://127.0.0.1:1"}


def learner(policy: Policy, name: OptimizerName) -> Learner:
    return Learner(copy.deepcopy(policy.model), learning_rate=1e-3, updates=2, optimizer_name=name)


def test_the_default_is_adamw_by_hand_without_weight_decay() -> None:
    """Steps of algorithm 2 of arXiv:1711.05101 in float64, with the betas 0.9 and 0.999, and 1e-8 in the divisor."""
    source = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(8, generator=source, dtype=torch.float64))
    optimizer = make_optimizer("adamw", [weight], 1e-2)
    by_hand, mean, square = weight.detach().clone(), torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for step in range(1, 6):
        weight.grad = torch.randn(8, generator=source, dtype=torch.float64) * 10.0 ** torch.arange(-7, 1)
        mean, square = 0.9 * mean + 0.1 * weight.grad, 0.999 * square + 0.001 * weight.grad**2
        by_hand -= 1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
        assert torch.allclose(weight, by_hand, rtol=0, atol=1e-12), step


@pytest.mark.full
def test_states_of_8_bits_take_a_quarter_and_step_like_adamw(policy: Policy) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the [bitsandbytes] extra")
    found: list[tuple[int, torch.Tensor]] = []
    for name in ("adamw", "adamw_8bit"):
        trained = learner(policy, name)
        trained.update(make_batch(policy), ADVANTAGES)
        assert {group["weight_decay"] for group in trained.optimizer.param_groups} == {0.0}
        held = [each for of_weight in trained.optimizer.state.values() for each in of_weight.values() if isinstance(each, torch.Tensor)]
        size = sum({each.data_ptr(): each.nbytes for each in held}.values())
        moved = [one - other for one, other in zip(trained.model.parameters(), policy.model.parameters(), strict=True)]
        found.append((size, torch.cat([each.detach().flatten() for each in moved])))
    assert found[1][0] < found[0][0] / 3
    assert torch.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.9


@pytest.mark.full
def test_a_checkpoint_restores_states_of_8_bits_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the [bitsandbytes] extra")
    batch, first, second = make_batch(policy), learner(policy, "adamw_8bit"), learner(policy, "adamw_8bit")
    first.update(batch, ADVANTAGES)
    checkpoints = Checkpoints(tmp_path, keep=1)
    place = checkpoints.save(state(1), first.model, first.optimizer)
    update = first.update(batch, ADVANTAGES)
    checkpoints.load(place, "grpo-1", second.model, second.optimizer)
    assert second.update(batch, ADVANTAGES) == update
    assert all(torch.equal(one, other) for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("algorithm", [GRPO.from_options, SFT])
def test_what_cannot_be_used_is_refused_by_name(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r'optimizer = "paged_adamw_8bit": .* device = "cpu".*"adamw_8bit"'):
        algorithm(**MODEL, optimizer="paged_adamw_8bit")
    with pytest.raises(UsageError, match="optimizer = "):
        algorithm(**MODEL, optimizer="sgd")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingsError, match=r"needs the \[bitsandbytes\] extra \(.* is missing\): pip install 'agl-otel\[bitsandbytes\]'"):
        algorithm(**MODEL, optimizer="adamw_8bit")
