"""Of which distribution a server's log-probs are, by two of its answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_otel.proxy.logprob_mode import logprob_mode


def answer(logits: dict[str, float], scale: float, sampled: str = "") -> dict[str, Any]:
    total = math.log(sum(math.exp(logit / scale) for logit in logits.values()))
    top = [{"token": token, "logprob": logit / scale - total} for token, logit in logits.items() if math.isfinite(logit)]
    return {"choices": [{"logprobs": {"content": [{"token": sampled, "top_logprobs": top}]}}]}


LOGITS = {"c": -1.0, "a": 2.0, "b": 0.5, "cut off by the server's top_k": -math.inf}


@pytest.mark.parametrize(
    ("at_one", "at_two", "mode"),
    [
        (answer(LOGITS, 1.0), answer(LOGITS, 2.0), "processed"),
        (answer(LOGITS, 1.0), answer(LOGITS, 1.0), "raw"),
        (answer(LOGITS, 1.0), answer({token: logit * 1.04 for token, logit in LOGITS.items()}, 2.0), "processed"),  # bfloat16
        (answer(LOGITS, 1.0), answer(LOGITS, 1.4), ""),  # neither
        (answer(dict.fromkeys("abc", 1.0), 1.0), answer(dict.fromkeys("abc", 1.0), 2.0), ""),  # a tie shows nothing
        (answer(LOGITS, 1.0), answer({"x": 1.0, "y": 0.0}, 2.0), ""),  # other tokens
        (answer({"a": 0.0}, 1.0), answer({"a": 0.0}, 2.0), ""),
        ({}, answer(LOGITS, 2.0), ""),
        (answer(LOGITS, 1.0), {"choices": [{"logprobs": None}]}, ""),
        ({"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "a", "logprob": "x"}]}]}}]}, {}, ""),
    ],
)
def test_halved_differences_are_those_of_the_sampled_distribution(at_one: dict[str, Any], at_two: dict[str, Any], mode: str) -> None:
    assert logprob_mode(at_one, at_two) == mode
