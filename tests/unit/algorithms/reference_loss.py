"""Reference implementation of the losses: token by token, in float64 with autograd, from the papers and independent of objective.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agl_otel.algorithms.grpo.options import Objective


class Row(NamedTuple):
    """The trained tokens of one trajectory."""

    rollout: str
    new: list[Tensor]
    """float64 scalars with a gradient."""
    old: list[float]
    behaviour: list[float]
    reference: list[float]
    advantage: float


def reference_loss(batch: Sequence[Row], options: Objective) -> Tensor:
    """Compute the loss, a float64 scalar."""
    rows = [row for row in batch if row.new]
    of_rollout: dict[str, int] = {}
    for row in rows:
        of_rollout[row.rollout] = of_rollout.get(row.rollout, 0) + len(row.new)
    tokens = sum(len(row.new) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        size = len(row.new)
        share = {
            "token": tokens,
            "sequence": size * len(rows),
            "rollout": of_rollout[row.rollout] * len(rows),
            "constant": options.constant_tokens * len(rows),
        }[options.average]
        whole = torch.exp(sum((n - o for n, o in zip(row.new, row.old, strict=True)), torch.zeros(())) / size)
        for new, old, behaviour, reference in zip(row.new, row.old, row.behaviour, row.reference, strict=True):
            ratio = whole if options.sequence_ratio else torch.exp(new - old)
            low, high = 1 - options.clip, 1 + (options.clip if options.clip_high is None else options.clip_high)
            clipped = torch.minimum(torch.maximum(ratio, torch.tensor(low)), torch.tensor(high))
            gain = torch.minimum(ratio * row.advantage, clipped * row.advantage)
            if options.dual_clip is not None and row.advantage < 0:
                gain = torch.maximum(gain, torch.tensor(options.dual_clip * row.advantage))
            if options.weight_cap is not None:
                gain = min(float(ratio.detach()), options.weight_cap) * row.advantage * new
            if options.importance_cap is not None:
                gain = gain * min(float(torch.exp(torch.tensor(old - behaviour, dtype=torch.float64))), options.importance_cap)
            term = -gain
            if options.kl:
                term = term + options.kl * (torch.exp(reference - new) - (reference - new) - 1)
            total = total + term / share
    return total
