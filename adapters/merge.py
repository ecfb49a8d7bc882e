"""Which calls of one attempt make one trajectory: a pure rule over token ids.

Calls of one proxy process are taken in the order of their numbers. A call joins a trajectory only where its full prompt starts,
token for token, with all that this trajectory holds so far (prompt, responses, and what came between); the longest such trajectory
wins, of equal ones the earliest. What the prompt adds goes in with mask 0. Every other call starts a trajectory of its own, and the
reason is one of BREAKS. So each token that the model wrote is trained on exactly once, and nothing is ever tokenised again.

Prompts in prefix form are made full first (`full_prompts`); a reference that leads nowhere is reported, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

BREAKS: Final = {
    "choice": "a further choice of the same call (n > 1)",
    "branch": "the prompt goes on from an earlier call whose trajectory has meanwhile gone on otherwise",
    "agent": "it would join, but another agent made the call",
    "model_version": "it would join, but other weights answered",
    "response_changed": "the prompt starts with an earlier prompt, but not with what the model answered there",
    "prompt_changed": "the prompt does not even start with an earlier prompt: edited history, or another conversation",
    "process": "the first call that another proxy process saw",
}
"""Why a call that is not an attempt's first started a new trajectory."""


@dataclass(frozen=True)
class Call:
    """One (call, choice) of an attempt, as seen by one proxy process."""

    row: int
    """Where it stands in the columns."""
    call: int
    prompt: TokenIds
    """The full prompt."""
    response: TokenIds
    agent: str = ""
    model_version: str = ""


@dataclass(frozen=True)
class Merged:
    """Calls that make one trajectory, in order, and why it did not join an earlier one."""

    calls: list[Call]
    reason: str = ""
    """A key of BREAKS; empty for the first of a process."""

    @property
    def length(self) -> int:
        """Tokens so far: the last prompt, which holds all before it, and the last response."""
        return len(self.calls[-1].prompt) + len(self.calls[-1].response)


def merge(calls: Sequence[Call]) -> list[Merged]:
    """The trajectories of one attempt and process; `calls` sorted by (call, choice), all of them fit to train on."""
    merged: list[Merged] = []
    seen: list[Call] = []
    for call in calls:
        tips = [m for m in merged if _goes_on(call, m.calls[-1])]
        own = [m for m in tips if m.calls[-1].agent == call.agent and m.calls[-1].model_version == call.model_version]
        if own:
            max(own, key=lambda m: m.length).calls.append(call)
        else:
            merged.append(Merged([call], _reason(call, [m.calls[-1] for m in tips], seen) if seen else ""))
        seen.append(call)
    return merged


def _goes_on(call: Call, last: Call) -> bool:
    """Whether the prompt starts with the prompt and response of `last`. Choices of one call never follow each other."""
    return call.call != last.call and _starts_with(call.prompt, last.prompt, last.response)


def _starts_with(tokens: TokenIds, first: TokenIds, second: TokenIds) -> bool:
    middle, end = len(first), len(first) + len(second)
    return (
        len(tokens) >= end
        and (end == 0 or bool(tokens[end - 1] == (second[-1] if len(second) else first[-1])))  # cheap: most others differ here
        and np.array_equal(tokens[:middle], first)
        and np.array_equal(tokens[middle:end], second)
    )


def _reason(call: Call, tips: Sequence[Call], seen: Sequence[Call]) -> str:
    if tips:
        return "agent" if all(tip.agent != call.agent for tip in tips) else "model_version"
    if any(other.call == call.call for other in seen):
        return "choice"
    if any(_goes_on(call, other) for other in seen):
        return "branch"
    nothing = call.prompt[:0]
    return "response_changed" if any(_starts_with(call.prompt, other.prompt, nothing) for other in seen) else "prompt_changed"


def lay_out(merged: Merged, logprobs: Sequence[NDArray[np.float32]]) -> tuple[TokenIds, TokenIds, NDArray[np.int8], NDArray[np.float32]]:
    """(prompt, response, response mask, log-probs) of one trajectory; the last three are equally long.

    `logprobs`: one array for each of its calls, as long as that call's response. Tokens that came between (a tool's answer, the next
    question) are in the response with mask 0 and log-prob 0.
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


@dataclass(frozen=True)
class StoredCall:
    """One (call, choice) as stored: where `prefix_call` is not 0, `prompt` holds only what follows that call and choice."""

    call: int
    choice: int
    prefix_call: int
    prefix_choice: int
    prompt: TokenIds
    response: TokenIds


def full_prompts(calls: Sequence[StoredCall]) -> list[TokenIds | None]:
    """The full prompt of each call of one attempt and process, sorted by (call, choice); None where a reference leads nowhere.

    A reference must name an earlier call that is there and whose own prompt is known.
    """
    referenced = {(stored.prefix_call, stored.prefix_choice) for stored in calls if stored.prefix_call}
    known: dict[tuple[int, int], TokenIds] = {}
    prompts: list[TokenIds | None] = []
    for stored in calls:
        prompt: TokenIds | None = stored.prompt
        if stored.prefix_call:
            base = known.get((stored.prefix_call, stored.prefix_choice)) if stored.prefix_call < stored.call else None
            prompt = None if base is None else np.concatenate([base, stored.prompt])
        if prompt is not None and len(prompt) and (stored.call, stored.choice) in referenced:
            known[stored.call, stored.choice] = np.concatenate([prompt, stored.response])
        prompts.append(prompt)
    return prompts
