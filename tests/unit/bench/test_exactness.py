"""The comparison of trajectories with the sampled calls finds every kind of difference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters import TrajectoryBatch
from agl_otel.types.columns import Ragged
from bench.exact_server import Sampled
from bench.exactness import Result, differences

CALLS = [Sampled([1, 2], [3], [-0.5], ""), Sampled([1, 2, 3, 4], [5, 6], [-1.0, -2.0], "")]
GOOD = TrajectoryBatch(
    prompt=Ragged.from_rows([[1, 2]], np.int32),
    response=Ragged.from_rows([[3, 4, 5, 6]], np.int32),
    response_mask=Ragged.from_rows([[1, 0, 1, 1]], np.int8),
    logprobs=Ragged.from_rows([[-0.5, 0.0, -1.0, -2.0]], np.float32),
    reward=np.ones(1, np.float32),
    rollout_id=["ro-1"],
    attempt_id=["at-1"],
    agent=[""],
    calls=np.array([2]),
    model_version=["1"],
    verdict=["complete"],
    images=[[]],
    rows=Ragged.from_rows([[0, 1]], np.int64),
    refused=Counter(),
    breaks=Counter(),
)


def test_an_exact_sample_has_no_differences() -> None:
    assert differences(GOOD, 0, CALLS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": Ragged.from_rows([[1, 9]], np.int32)}, "the prompt is not"),
        ({"response": Ragged.from_rows([[3, 4, 5, 7]], np.int32)}, "the reply is not"),
        ({"response": Ragged.from_rows([[3, 4, 5, 6, 7]], np.int32)}, "the length is not"),
        ({"response_mask": Ragged.from_rows([[1, 1, 1, 1]], np.int8)}, "the mask"),
        ({"logprobs": Ragged.from_rows([[-0.5, 0.0, -1.0, -2.5]], np.float32)}, "the log-probs"),
    ],
)
def test_a_difference_from_the_sampled_calls_is_named(change: Any, message: str) -> None:
    assert any(message in what for what in differences(replace(GOOD, **change), 0, CALLS))


def test_a_run_with_too_many_refusals_or_any_difference_is_bad() -> None:
    assert Result(whole=100, whole_accepted=99).good
    assert not Result(whole=100, whole_accepted=98).good
    assert not Result(whole=100, whole_accepted=100, wrong=["x"]).good
