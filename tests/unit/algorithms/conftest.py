from __future__ import annotations

import pytest
import torch

from agl_otel.algorithms.grpo import tiny
from agl_otel.algorithms.grpo.policy import Policy


@pytest.fixture(scope="session", params=[False, True], ids=["untied", "tied"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Return an untrained tiny model, whose head is its embedding or not."""
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, seed=1, tied=request.param).eval()
    return Policy(model, tokenizer, frozenset({tiny.SPECIAL_TOKENS.index(tiny.END)}), tiny.CONTEXT_TOKENS)
