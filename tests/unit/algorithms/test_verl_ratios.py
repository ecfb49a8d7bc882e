from __future__ import annotations

import math

import pytest
import torch

from agl_otel.algorithms.verl.ratios import compared
from agl_otel.errors import DataError

CAPTURED = torch.full((3, 4), -1.0)
WRITTEN = torch.tensor([[True, True, False, False], [True, False, True, False], [True, True, True, True]])
CURRENT = torch.tensor([True, True, False])


def off(row: int, column: int, ratio: float) -> torch.Tensor:
    """verl's log-probs, where the ratio of one token is `ratio` and those of the others 1."""
    ours = CAPTURED.clone()
    ours[row, column] += math.log(ratio)
    return ours


def test_tokens_that_were_sampled_otherwise_end_the_run_before_an_update() -> None:
    with pytest.raises(
        DataError, match=r"worst 1 % of 4 tokens is off by 0\.25 on average \(ratio_error_limit = 0\.1\)\. Nothing was changed"
    ):
        compared(off(1, 2, 2.0), CAPTURED, WRITTEN, CURRENT, limit=0.1)
    with pytest.raises(DataError, match="is off by nan on average"):
        compared(off(0, 1, math.nan), CAPTURED, WRITTEN, CURRENT, limit=10.0)
    assert compared(off(1, 2, 2.0), CAPTURED, WRITTEN, CURRENT, limit=None) == pytest.approx((1.0, 0.25))


def test_tokens_that_the_model_did_not_write_are_not_compared() -> None:
    assert compared(off(0, 2, 9.0), CAPTURED, WRITTEN, CURRENT, limit=0.1) == (0.0, 0.0)


def test_tokens_of_earlier_weights_are_shown_and_do_not_end_the_run() -> None:
    assert compared(off(2, 0, 3.0), CAPTURED, WRITTEN, CURRENT, limit=0.1) == pytest.approx((2.0, 0.0))
    assert compared(CAPTURED, CAPTURED, WRITTEN, ~torch.ones(3, dtype=torch.bool), limit=0.1) == (0.0, 0.0)
