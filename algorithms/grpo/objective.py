"""The GRPO objective as pure functions on tensors: no model, no I/O, no state.

Group-relative advantages of DeepSeekMath (arXiv:2402.03300, §4.1.2, outcome supervision) in the clipped surrogate of PPO
(arXiv:1707.06347, eq. 7). What is left out, and why:

- the KL term to a reference model (eq. 3's beta): a verifiable reward cannot be hacked by drifting, and it costs a second model
  and forward pass (DAPO, arXiv:2503.14476, leaves it out too);
- an entropy bonus: groups sampled at temperature 1 explore enough, and it would need the whole distribution, not the sampled token;
- eq. 3's mean over each response before the mean over responses: it weighs a token less the longer its response is. Here every
  token that the model wrote weighs the same (DAPO's token-level loss).
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6  # keeps the division finite; a group that differs at all has a std of at least 0.1 with rewards in [0, 1]


def group_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = STD_EPSILON) -> Tensor:
    """Each reward relative to its group: (r - mean) / (std + epsilon), with the unbiased std (n - 1).

    `rewards`: float [n]; `groups`: int64 [n], 0 … g - 1, which group each belongs to, in any order and of any size. Returns float [n].
    A group whose rewards are all equal, or of one member, says nothing about what is better: its advantages are exactly 0.
    """
    count = torch.bincount(groups).to(rewards.dtype)
    zeros = torch.zeros(len(count), dtype=rewards.dtype, device=rewards.device)
    mean = zeros.index_add(0, groups, rewards) / count.clamp(min=1)
    centred = rewards - mean[groups]
    std = (zeros.index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    return torch.where((highest > lowest)[groups], centred / (std[groups] + epsilon), torch.zeros_like(rewards))


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Natural log-probability of each token under `softmax(logits / temperature)`, in float32.

    `logits`: [..., vocabulary], the ones that predict `token_ids`: int64 [...]. Returns float32 [...]. Temperature 0 (greedy) uses
    the unscaled distribution, as the model server does.
    """
    scaled = logits.float() / (temperature or 1.0)
    return scaled.gather(-1, token_ids[..., None])[..., 0] - torch.logsumexp(scaled, dim=-1)


def surrogate_loss(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, *, clip: float = 0.2) -> Tensor:
    """The clipped surrogate of PPO (eq. 7), negated, as the mean over the given tokens: a scalar to minimise.

    All float [tokens], model-written tokens only: `logprobs` under the weights being trained, `behaviour_logprobs` as captured when
    the token was sampled, `advantages` of the trajectory each token belongs to.
    """
    ratio = torch.exp(logprobs - behaviour_logprobs)
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages).mean()


def max_ratio_error(logprobs: Tensor, behaviour_logprobs: Tensor) -> float:
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| over the given model-written tokens.

    On the first update of a step the weights are those that sampled, so anything but rounding (about 1e-6 in float32) means that the
    trainer sees other tokens, weights or temperature than the model server used.
    """
    return float((torch.exp(logprobs - behaviour_logprobs) - 1.0).abs().max()) if logprobs.numel() else 0.0
