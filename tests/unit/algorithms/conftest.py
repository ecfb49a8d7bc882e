from __future__ import annotations

import pytest
import torch

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.policy import Policy


@pytest.fixture(scope="session")
def policy() -> Policy:
    """Return an untrained tiny model."""
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed=1).eval()
    return Policy(model, tokenizer, frozenset({tiny.SPECIAL_TOKENS.index(tiny.END)}), tiny.CONTEXT_TOKENS)
