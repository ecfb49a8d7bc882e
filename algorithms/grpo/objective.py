"""The GRPO objective as pure functions on tensors: no model, no I/O, no state.

Group-relative advantages of DeepSeekMath (arXiv:2402.03300, §4.1.2, outcome supervision) in the clipped surrogate of PPO
(arXiv:1707.06347, eq. 7). `options.Objective` holds the options with their sources; the defaults are these two, with equal weight for
every token that the model wrote, no KL term (a verifiable reward cannot be hacked by drifting, and the term costs a second model and
forward pass) and no entropy bonus (groups sampled at temperature 1 explore enough).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from agl_otel.algorithms.grpo.options import Objective
from agl_otel.errors import UsageError

WORST_TOKENS: Final = 8
STD_EPSILON = 1e-6  # keeps the division finite; a group that differs at all has a std of at least 0.1 with rewards in [0, 1]


def group_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = STD_EPSILON, scaled: bool = True) -> Tensor:
    """Compute each reward's advantage in its group: (r - mean) / (std + epsilon), with the unbiased std (n - 1).

    Without `scaled` it is r - mean: Dr. GRPO (arXiv:2503.20783, §3.2), where groups of nearly equal rewards are not amplified.
    `rewards`: float [n]; `groups`: int64 [n], 0 … g - 1, the group of each reward, in any order. Returns float [n]. The advantages of
    a group with equal rewards, or with one member, are exactly 0.
    """
    count = torch.bincount(groups).to(rewards.dtype)
    zeros = torch.zeros(len(count), dtype=rewards.dtype, device=rewards.device)
    mean = zeros.index_add(0, groups, rewards) / count.clamp(min=1)
    centred = rewards - mean[groups]
    std = (zeros.index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    relative = centred / (std[groups] + epsilon) if scaled else centred
    return torch.where((highest > lowest)[groups], relative, torch.zeros_like(rewards))


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: Tensor | float = 1.0) -> Tensor:
    """Compute the natural log-probability of each token under `softmax(logits / temperature)`, in float32.

    `logits`: [..., vocabulary], the ones that predict `token_ids`: int64 [...]; `temperature`: of all tokens, or [...]. Returns float32
    [...]. Temperature 0 (greedy) uses the unscaled distribution, as the model server does.
    """
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    scaled = logits.float() / torch.where(scale == 0, 1.0, scale)[..., None]
    return scaled.gather(-1, token_ids[..., None])[..., 0] - torch.logsumexp(scaled, dim=-1)


def token_weights(sequence: Tensor, rollout: Tensor, options: Objective) -> Tensor:
    """Compute the weight of each token's term in the sum, over the whole batch, so that the loss may be computed in parts.

    `sequence`: int64 [tokens], the trajectory (0 … n - 1) of each token; `rollout`: int64 [n], the rollout of each trajectory; a
    trajectory may have no token. Returns float32 [tokens]. The rollout average is 1 / (tokens of the rollout * trajectories of the
    batch), as in verl's per-rollout mean.
    """
    lengths = torch.bincount(sequence, minlength=len(rollout))
    rows = max(1, int((lengths > 0).sum()))
    match options.average:
        case "token":
            return torch.full(sequence.shape, 1.0 / max(1, len(sequence)), device=sequence.device)
        case "sequence":
            return 1.0 / (lengths[sequence] * rows)
        case "rollout":
            totals = torch.zeros(int(rollout.max()) + 1, dtype=lengths.dtype, device=lengths.device).index_add(0, rollout, lengths)
            return 1.0 / (totals[rollout[sequence]] * rows)
        case "constant":
            return torch.full(sequence.shape, 1.0 / (options.constant_tokens * rows), device=sequence.device)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    options: Objective,
    *,
    behaviour_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> Tensor:
    """Compute the scalar to minimise: the weighted sum of the terms of the clipped surrogate, or of CISPO with options.weight_cap, and of
    the KL terms with options.kl.

    Args (all [tokens], model-written tokens only):
        logprobs: under the weights being trained.
        old_logprobs: the denominator of the ratio.
        advantages: of each token: that of its trajectory, or of its call.
        weights: from token_weights.
        sequence: int64, the trajectory of each token; with options.sequence_ratio all tokens of a trajectory must be in one call.
        options: of the loss.
        behaviour_logprobs: under the weights that sampled; for options.importance_cap.
        reference_logprobs: under the initial weights; for options.kl.

    Raises UsageError where an option lacks its log-probs.
    """
    log_ratio = logprobs - old_logprobs
    if options.sequence_ratio:
        log_ratio = _mean_of_sequence(log_ratio, sequence)
    ratio = torch.exp(log_ratio)
    high = options.clip if options.clip_high is None else options.clip_high
    if options.weight_cap is not None:
        gain = ratio.detach().clamp(max=options.weight_cap) * advantages * logprobs
    else:
        gain = torch.min(ratio * advantages, ratio.clamp(1.0 - options.clip, 1.0 + high) * advantages)
    if options.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.max(gain, options.dual_clip * advantages), gain)
    if options.importance_cap is not None:
        if behaviour_logprobs is None:
            raise UsageError("importance_cap needs the log-probs of the weights that sampled the tokens")
        gain = gain * torch.exp(old_logprobs - behaviour_logprobs).clamp(max=options.importance_cap)
    terms = -gain
    if options.kl:
        if reference_logprobs is None:
            raise UsageError("kl needs the log-probs of the reference model")
        terms = terms + options.kl * kl_terms(logprobs, reference_logprobs)
    return (terms * weights).sum()


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference at each token; never negative (DeepSeekMath, eq. 4). All [tokens]."""
    drift = reference_logprobs - logprobs
    return torch.exp(drift) - drift - 1.0


def _mean_of_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Replace every value by the mean of its sequence."""
    _, place, count = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return (sums / count)[place]


def ratio_errors(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Compute |exp(trainer's log-prob - captured log-prob) - 1| of model-written tokens: float32 [tokens].

    On the first update of a step the weights are those that sampled, so more than rounding errors (about 1e-6 in float32) means that the
    trainer uses other tokens, weights or temperature than the model server did.
    """
    return (torch.exp(logprobs - behaviour_logprobs) - 1.0).abs()


def max_ratio_error(logprobs: Tensor, behaviour_logprobs: Tensor) -> float:
    """Compute the greatest of `ratio_errors`; 0 for no token."""
    return float(ratio_errors(logprobs, behaviour_logprobs).max()) if logprobs.numel() else 0.0


def worst_ratio_error(errors: Tensor) -> float:
    """Compute the mean of the greatest hundredth of `ratio_errors`, of at least WORST_TOKENS; 0 for no token.

    A server in bfloat16 has a few tokens whose ratio is far from 1, though it samples as the trainer expects; their mean is stable.
    """
    count = min(len(errors), max(WORST_TOKENS, math.ceil(len(errors) / 100)))
    return float(errors.topk(count).values.mean()) if count else 0.0
