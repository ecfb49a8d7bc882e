"""Merges the calls of one attempt into trajectories: a pure rule over token ids.

Calls of one proxy process are taken in the order of their numbers. A call joins a trajectory only if its full prompt starts, token for
token, with everything in the trajectory so far (prompt, responses, and tokens between); the longest such trajectory wins, then the
earliest. Tokens that the prompt adds get mask 0. Every other call starts a new trajectory, for one of SPLIT_REASONS
(split_reasons.py). So each token that the model wrote is trained on exactly once, and nothing is tokenised again.

Prompts in prefix form are expanded first (agl_otel/spans/history.py); a dangling reference is reported, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.prefix_index import PrefixIndex, rolling_hashes
from agl_otel.adapters.split_reasons import SPLIT_REASONS, Call, EarlierCalls, TokenIds, continues, reason

__all__ = ["SPLIT_REASONS", "Call", "Merged", "TokenIds", "lay_out", "merge"]


@dataclass(frozen=True)
class Merged:
    """The calls of one trajectory, in order, and the reason why it started."""

    calls: list[Call]
    reason: str = ""
    """A key of SPLIT_REASONS; empty for the first trajectory of a process."""

    @property
    def length(self) -> int:
        """Number of tokens so far: the last prompt, which includes everything before it, and the last response."""
        return len(self.calls[-1].prompt) + len(self.calls[-1].response)


def merge(calls: Sequence[Call]) -> list[Merged]:
    """Merge the calls of one attempt and process, sorted by (call, choice) and all fit for training."""
    merged: list[Merged] = []
    ends, seen = PrefixIndex(len(calls)), EarlierCalls(len(calls))
    for call in calls:
        hashes = rolling_hashes(call.prompt, call.response)
        asked = hashes[: len(call.prompt) + 1]
        tips = [place for place in ends.of(asked) if continues(call, merged[place].calls[-1])]
        own = [place for place in tips if _alike(merged[place].calls[-1], call)]
        if own:
            place = max(own, key=lambda each: merged[each].length)
            merged[place].calls.append(call)
        else:
            place = len(merged)
            why = reason(call, asked, [merged[each].calls[-1] for each in tips], seen) if seen.calls else ""
            merged.append(Merged([call], why))
        ends.set(place, hashes)
        seen.add(call, hashes)
    return merged


def _alike(last: Call, call: Call) -> bool:
    return last.agent == call.agent and last.model_version == call.model_version


def lay_out(merged: Merged, logprobs: Sequence[NDArray[np.float32]]) -> tuple[TokenIds, TokenIds, NDArray[np.int8], NDArray[np.float32]]:
    """Return (prompt, response, response mask, log-probs) of one trajectory; the last three have equal length.

    `logprobs`: one array per call, as long as the call's response. Tokens between responses (a tool's answer, the next question) are part
    of the response with mask 0 and log-prob 0.
    """
    first = merged.calls[0]
    tokens: list[NDArray[Any]] = []
    masks: list[NDArray[np.int8]] = []
    kept: list[NDArray[np.float32]] = []
    end = len(first.prompt)
    for call, captured in zip(merged.calls, logprobs, strict=True):
        between = call.prompt[end:]
        tokens += [between, call.response]
        masks += [np.zeros(len(between), np.int8), np.ones(len(call.response), np.int8)]
        kept += [np.zeros(len(between), np.float32), captured]
        end = len(call.prompt) + len(call.response)
    return first.prompt, np.concatenate(tokens), np.concatenate(masks), np.concatenate(kept)
