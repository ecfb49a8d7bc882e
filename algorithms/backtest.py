"""Scores stored replies under a policy that did not write them, for back-tests (adapters/offpolicy.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agl_otel.adapters.ragged import count_per_row, take
from agl_otel.adapters.trajectories import TrajectoryBatch
from agl_otel.algorithms.grpo.learner import end_to_end
from agl_otel.algorithms.grpo.logprobs import Scorer
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.errors import UsageError
from agl_otel.types.columns import Ragged

PASS_TOKENS = 16384


def logprobs_under(policy: Policy, batch: TrajectoryBatch, temperatures: Ragged, *, most_tokens: int = PASS_TOKENS) -> NDArray[np.float32]:
    """Return the log-probs under a policy of the tokens that the model wrote, of one trajectory after the other: float32 [tokens].

    Args:
        policy: with the tokenizer of the one that wrote them.
        batch: trajectories, uncut.
        temperatures: of these tokens, a row for each trajectory (sampling.token_temperatures).
        most_tokens: of one forward pass.

    Raises UsageError if the policy cannot read the tokens.
    """
    lengths = batch.prompt.lengths + batch.response.lengths
    if len(lengths):
        _check(policy, batch, int(lengths.max()))
    scorer = Scorer(policy.model)
    counts = count_per_row(batch.response_mask.values == 1, batch.response_mask.offsets)
    offsets = np.append(0, np.cumsum(counts))
    found = np.zeros(int(offsets[-1]), np.float32)
    for rows in scorer.passes(lengths, most_tokens):
        places: Any = take(Ragged(np.arange(offsets[-1]), offsets), rows).values
        with torch.no_grad():
            found[places] = end_to_end(batch, temperatures, rows, scorer.device).logprobs(scorer).float().cpu().numpy()
    return found


def _check(policy: Policy, batch: TrajectoryBatch, longest: int) -> None:
    greatest = max(int(np.max(ids.values, initial=0)) for ids in (batch.prompt, batch.response))
    if greatest >= policy.vocabulary:
        raise UsageError(
            f"token id {greatest} was logged, and the policy has a vocabulary of {policy.vocabulary}: back-test a policy with the "
            "tokenizer of the one that was logged"
        )
    if longest > policy.context_tokens:
        raise UsageError(f"a conversation has {longest} tokens, and the policy reads {policy.context_tokens} at most")
