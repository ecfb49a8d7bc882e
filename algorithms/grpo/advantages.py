"""The advantages of a step's trajectories: one for all tokens of a rollout, or one for each of its calls (adapters/credit.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agl_otel.adapters.credit import Rule, credit
from agl_otel.adapters.ragged import count_per_row
from agl_otel.adapters.token_columns import spread
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.objective import group_advantages
from agl_otel.types.columns import Ragged, Traces


@dataclass(frozen=True)
class Scored:
    """The advantages of a batch."""

    advantages: NDArray[np.float32] | Ragged
    """One for each trajectory, or for each token that the model wrote."""
    learns: NDArray[np.bool_]
    """For each trajectory, whether one of its advantages is not 0."""
    matched_states: float | None = None
    """StepReport.matched_states."""


def compared(values: NDArray[np.float32], groups: NDArray[np.int64], *, scaled: bool) -> NDArray[np.float32]:
    """Return `group_advantages` in torch's arithmetic, whatever the rule: of equal returns they are equal to the last bit."""
    return group_advantages(torch.from_numpy(values), torch.from_numpy(groups), scaled=scaled).numpy()


def scored(
    traces: Traces,
    batch: TrajectoryBatch,
    rollouts: NDArray[np.int64],
    groups: NDArray[np.int64],
    rule: Rule | None,
    *,
    scaled: bool,
    agent_match: str | None,
    permuted: Callable[[Any], Any] | None,
) -> Scored:
    """Compute the advantages of a batch.

    Args:
        traces: those of the batch; with a rule, with their tree.
        batch: trajectories; those of one rollout are together.
        rollouts: int64, the rollout of each trajectory, 0, 1, …, in order.
        groups: int64, the group of each rollout, 0 … g - 1.
        rule: None: a rollout's advantage is that of its reward.
        scaled: Objective.scale_advantages.
        agent_match: that of the batch.
        permuted: permutes rewards, for a control experiment.
    """
    if rule is None:
        rewards = batch.reward[np.unique(rollouts, return_index=True)[1]]
        advantages = compared(rewards if permuted is None else permuted(rewards), groups, scaled=scaled)[rollouts]
        return Scored(advantages, advantages != 0)
    found = credit(traces, batch, groups[rollouts], rule, agent_match=agent_match, permuted=permuted)
    learns = count_per_row(found.advantages != 0, batch.rows.offsets) > 0
    share = found.matched / max(1, found.states) if rule.states else None
    return Scored(spread(traces.calls, batch.rows, found.advantages), learns, share)
