"""Tell of which distribution a model server's log-probs are, by one reply at temperature 2 against one at temperature 1. Pure.

vLLM returns those of the unchanged logits unless it is started with --logprobs-mode processed_logprobs; no field of a request or an answer
says so. At another temperature than 1 a trainer would take them for those of the sampled distribution, and its gradient would be biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agl_otel.types.sampling import LogProbs

TEMPERATURES: Final = (1.0, 2.0)
FIELDS: Final[Mapping[str, Any]] = {"max_tokens": 1, "logprobs": True, "top_logprobs": 5}
"""Of the two requests, beside the temperature."""
_LEAST_GAP: Final = 0.05  # between the two most likely tokens, in nats: less shows nothing
_TOLERANCE: Final = 0.1  # of the ratio of the gaps: servers in bfloat16 round


def logprob_mode(at_one: Mapping[str, Any], at_two: Mapping[str, Any]) -> LogProbs:
    """Compare two answers of chat/completions to one prompt; empty if they do not show it.

    Dividing the logits by 2 halves the difference between two tokens' log-probs: processed ones have half of it, raw ones all.
    """
    first, second = _likely(at_one), _likely(at_two)
    shared = sorted(first.keys() & second.keys(), key=lambda token: -first[token])
    if len(shared) < 2 or first[shared[0]] - first[shared[1]] < _LEAST_GAP:
        return ""
    high, low = shared[:2]
    ratio = (second[high] - second[low]) / (first[high] - first[low])
    if abs(ratio - 0.5) < _TOLERANCE:
        return "processed"
    return "raw" if abs(ratio - 1.0) < _TOLERANCE else ""


def _likely(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return {token: log-prob} of the likeliest first tokens; empty if the answer has none."""
    try:
        found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {str(each["token"]): float(each["logprob"]) for each in found}
    except (LookupError, TypeError, ValueError):
        return {}
