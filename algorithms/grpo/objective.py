"""The GRPO objective as pure functions on tensors: no model, no I/O, no state.

Group-relative advantages of DeepSeekMath (arXiv:2402.03300, §4.1.2, outcome supervision) in the clipped surrogate of PPO
(arXiv:1707.06347, eq. 7). `Objective` holds the options, each of which says whose it is; the defaults are these two, with every token
that the model wrote weighing the same, no KL term (a verifiable reward cannot be hacked by drifting, and it costs a second model and
forward pass) and no entropy bonus (groups sampled at temperature 1 explore enough).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agl_otel.errors import UsageError

Average = Literal["token", "sequence", "rollout", "constant"]
STD_EPSILON = 1e-6  # keeps the division finite; a group that differs at all has a std of at least 0.1 with rewards in [0, 1]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The options of the loss. Raises UsageError where two do not go together or a number makes no sense."""

    clip: float = 0.2
    """How far below 1 a ratio still counts (PPO's epsilon)."""
    clip_high: float | None = None
    """How far above 1; None is `clip`. Greater than it: clip-higher of DAPO (arXiv:2503.14476, §3.1), 0.28 there."""
    dual_clip: float | None = None
    """Bounds the loss of a token with a negative advantage at this many times its advantage (arXiv:1912.09729, §3), 3.0 there."""
    sequence_ratio: bool = False
    """One ratio for a whole sequence, the geometric mean of its tokens': GSPO (arXiv:2507.18071, eq. 7). Clips of 3e-4 are usual there."""
    average: Average = "token"
    """What weighs the same: each token (DAPO §3.3), each trajectory ("sequence": DeepSeekMath, eq. 3), each rollout however many
    trajectories it has, or each token of `constant_tokens` a trajectory, so that length changes nothing ("constant": Dr. GRPO,
    arXiv:2503.20783, §3.2)."""
    constant_tokens: int = 0
    """For average="constant": what a trajectory's sum is divided by, its token budget."""
    importance_cap: float | None = None
    """Truncated importance sampling of stale tokens (arXiv:2505.24298, eq. 5): the ratio is against the weights before the step's first
    update, and each token's term is multiplied by min(those weights' probability / the sampler's, cap); 2.0 is usual. None: the
    ratio is against the sampler itself."""
    kl: float = 0.0
    """Coefficient of the KL term to the weights that the run began with (DeepSeekMath, eq. 4); 0 needs no second model."""
    scale_advantages: bool = True
    """Divide advantages by their group's standard deviation; False is Dr. GRPO's (`group_advantages`)."""

    def __post_init__(self) -> None:
        for name, least in (("clip", 0.0), ("clip_high", 0.0), ("dual_clip", 1.0), ("importance_cap", 0.0)):
            value = getattr(self, name)
            if value is not None and not value > least:
                raise UsageError(f"{name} is {value}: it must be greater than {least:g}")
        if self.average == "constant" and self.constant_tokens < 1:
            raise UsageError('average is "constant", so constant_tokens must say the token budget of a trajectory')
        if self.kl < 0:
            raise UsageError(f"kl is {self.kl}: a coefficient must not be negative")


def group_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = STD_EPSILON, scaled: bool = True) -> Tensor:
    """Each reward relative to its group: (r - mean) / (std + epsilon), with the unbiased std (n - 1).

    Without `scaled` it is r - mean: Dr. GRPO (arXiv:2503.20783, §3.2), where groups of nearly equal rewards are not blown up.
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
    relative = centred / (std[groups] + epsilon) if scaled else centred
    return torch.where((highest > lowest)[groups], relative, torch.zeros_like(rewards))


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Natural log-probability of each token under `softmax(logits / temperature)`, in float32.

    `logits`: [..., vocabulary], the ones that predict `token_ids`: int64 [...]. Returns float32 [...]. Temperature 0 (greedy) uses
    the unscaled distribution, as the model server does.
    """
    scaled = logits.float() / (temperature or 1.0)
    return scaled.gather(-1, token_ids[..., None])[..., 0] - torch.logsumexp(scaled, dim=-1)


def token_weights(sequence: Tensor, rollout: Tensor, options: Objective) -> Tensor:
    """What each token's term is multiplied by before all are added up. Computed over the whole batch, so that it may be taken in parts.

    `sequence`: int64 [tokens], the trajectory (0 … n - 1) of each token; `rollout`: int64 [n], the rollout of each trajectory; a
    trajectory may have no token. Returns float32 [tokens]. The rollout average is 1 / (tokens of the rollout * trajectories of the
    batch), as verl's per-rollout mean.
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
    """The scalar to minimise: the weighted sum of the clipped surrogate's terms, and of the KL term where it is asked for.

    All [tokens], model-written tokens only: `logprobs` under the weights being trained, `old_logprobs` under those that the ratio is
    against, `advantages` of the trajectory each token belongs to, `weights` of token_weights, `sequence` which trajectory it is (int64,
    any numbers; those of one trajectory must be together in one call where the ratio is of sequences). `behaviour_logprobs`, of the
    weights that sampled it, for options.importance_cap; `reference_logprobs` for options.kl.
    """
    log_ratio = logprobs - old_logprobs
    if options.sequence_ratio:
        log_ratio = _mean_of_sequence(log_ratio, sequence)
    ratio = torch.exp(log_ratio)
    high = options.clip if options.clip_high is None else options.clip_high
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
    """An estimate of the KL divergence from the reference at each token, never negative (DeepSeekMath, eq. 4). All [tokens]."""
    drift = reference_logprobs - logprobs
    return torch.exp(drift) - drift - 1.0


def _mean_of_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Every value replaced by the mean of its sequence's."""
    _, place, count = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return (sums / count)[place]


def max_ratio_error(logprobs: Tensor, behaviour_logprobs: Tensor) -> float:
    """The greatest |exp(trainer's log-prob - captured log-prob) - 1| over the given model-written tokens.

    On the first update of a step the weights are those that sampled, so anything but rounding (about 1e-6 in float32) means that the
    trainer sees other tokens, weights or temperature than the model server used.
    """
    return float((torch.exp(logprobs - behaviour_logprobs) - 1.0).abs().max()) if logprobs.numel() else 0.0
