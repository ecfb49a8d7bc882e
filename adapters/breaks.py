"""Why a call does not go on from an earlier one: a pure rule over token ids, names and, where they are known, messages.

Tokens alone say that a prompt differs, not why. Messages do: where those of an earlier call and its reply are all there again, in
other tokens, the template or the tokeniser drifted; where they are not, somebody edited the history. They are read only for attempts
that have a break (traces/reader.py), so an intact conversation pays nothing for them.

Whether a call asks again or goes on from an earlier one is looked up among all calls before it (prefix_index.py); what was edited or left
out, which means to compare them, among the LOOKED_AT latest of its agent: an attempt may have ten thousand calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.prefix_index import Hashes, PrefixIndex

TokenIds = NDArray[np.int32]
T = TypeVar("T")
SYSTEM: Final = ("system", "developer")
"""Roles of messages that say nothing of whose conversation it is."""

LOOKED_AT: Final = 64

BREAKS: Final = {
    "choice": "a further choice of the same call (n > 1)",
    "branch": "it asks again what was asked before, or goes on from an earlier call whose trajectory has meanwhile gone on otherwise",
    "sub_agent": "another agent's call, or a conversation of its own: it begins with another message than any before",
    "model_version": "it would join, but other weights answered",
    "template_drift": "the messages of an earlier call and its reply are all there, in other tokens: template or tokeniser changed them",
    "truncated": "a part of what an earlier call held is left out, and the rest up to its reply is kept",
    "history_edited": "messages of an earlier call, or its reply, were changed, and others of them kept",
    "response_changed": "the prompt starts with an earlier prompt, but not with what the model answered there; messages are not known",
    "prompt_changed": "the prompt does not even start with an earlier prompt; messages are not known",
    "process": "the first call that another proxy process saw",
}
"""Why a call that is not an attempt's first started a new trajectory; of several reasons the first that holds."""


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
    asked: tuple[str, ...] = ()
    """The messages of the prompt, each as "role: …"; none where they are not known."""
    answer: str = ""
    """The reply, in the same form."""


class Seen:
    """The calls of an attempt that came before, for at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.calls: list[Call] = []
        self._prompts = PrefixIndex(capacity)
        self._ends = PrefixIndex(capacity)
        self._by_agent: dict[str, list[Call]] = {}

    def add(self, call: Call, hashes: Hashes) -> None:
        """Add a call; `hashes` are those of its prompt and response."""
        self._prompts.set(len(self.calls), hashes[: len(call.prompt) + 1])
        self._ends.set(len(self.calls), hashes)
        self.calls.append(call)
        self._by_agent.setdefault(call.agent, []).append(call)

    def mates(self, call: Call) -> list[Call]:
        """The latest calls of the same agent."""
        return self._by_agent.get(call.agent, [])[-LOOKED_AT:]

    def bases(self, call: Call, hashes: Hashes) -> list[Call]:
        """Those that it goes on from; `hashes` are those of its prompt."""
        return [other for place in self._ends.of(hashes) if goes_on(call, other := self.calls[place])]

    def begun(self, call: Call, hashes: Hashes) -> Iterator[Call]:
        """Those of the same agent whose prompt its prompt begins with, the latest first."""
        nothing = call.prompt[:0]
        found = (self.calls[place] for place in reversed(self._prompts.of(hashes)))
        return (other for other in found if other.agent == call.agent and starts_with(call.prompt, other.prompt, nothing))


def goes_on(call: Call, last: Call) -> bool:
    """Whether the prompt starts with the prompt and response of `last`. Choices of one call never follow each other."""
    return call.call != last.call and starts_with(call.prompt, last.prompt, last.response)


def starts_with(tokens: TokenIds, first: TokenIds, second: TokenIds) -> bool:
    """Whether `tokens` begins with `first` and then `second`."""
    middle, end = len(first), len(first) + len(second)
    return (
        len(tokens) >= end
        and (end == 0 or bool(tokens[end - 1] == (second[-1] if len(second) else first[-1])))  # cheap: most others differ here
        and np.array_equal(tokens[:middle], first)
        and np.array_equal(tokens[middle:end], second)
    )


def reason(call: Call, hashes: Hashes, tips: Sequence[Call], seen: Seen) -> str:
    """The key of BREAKS.

    Args:
        call: with the number of the latest one before it, or a higher one.
        hashes: of its prompt.
        tips: the last calls of trajectories whose tokens it goes on from.
        seen: all calls before it; at least one.
    """
    mates = seen.mates(call)
    if seen.calls[-1].call == call.call:
        return "choice"
    if tips:
        return "model_version" if any(tip.agent == call.agent for tip in tips) else "sub_agent"
    if not mates:
        return "sub_agent"
    if any(len(other.prompt) == len(call.prompt) for other in seen.begun(call, hashes)):
        return "branch"
    bases = seen.bases(call, hashes)
    if call.asked and (known := [other for other in mates if other.asked]):
        return _by_messages(call, known, bases)
    if bases:
        return "branch"
    if any(_left_out(call, other) for other in mates):
        return "truncated"
    return "response_changed" if any(True for _ in seen.begun(call, hashes)) else "prompt_changed"


def _by_messages(call: Call, known: Sequence[Call], bases: Sequence[Call]) -> str:
    """`bases` are the calls whose tokens it goes on from."""
    going = [other for other in known if call.asked[: len(other.asked) + 1] == (*other.asked, other.answer)]
    kept, kept_in_tokens = (max((len(other.asked) + 1 for other in some), default=0) for some in (going, bases))
    shared = [_shared(call.asked, (*other.asked, other.answer)) for other in known]
    nearest = [other for other, count in zip(known, shared, strict=True) if count == max(shared)]
    if any(left_out(call.asked, (*other.asked, other.answer)) for other in nearest):
        return "truncated"
    if longest := max(kept, kept_in_tokens):
        if any(_shares(call.asked, (*other.asked, other.answer), longest) for other in known):
            return "history_edited"
        return "template_drift" if kept > kept_in_tokens else "branch"
    if any(call.asked == other.asked for other in known):
        return "template_drift"
    if any(_left_out(call, other) for other in nearest):
        return "truncated"
    return "history_edited" if any(_opening(call.asked) == _opening(other.asked) for other in known) else "sub_agent"


def _shares(asked: Sequence[str], history: Sequence[str], kept: int) -> bool:
    """Whether both begin with the same `kept` messages, and after those share the next one or a reply."""
    if asked[:kept] != history[:kept]:
        return False
    replies = {message for message in history[kept:] if message.startswith("assistant:")}
    return asked[kept : kept + 1] == history[kept : kept + 1] or not replies.isdisjoint(asked[kept:])


def _opening(messages: Sequence[str]) -> str:
    """The first message that is no instruction."""
    return next((message for message in messages if message.partition(":")[0] not in SYSTEM), "")


def left_out(sequence: Sequence[T], history: Sequence[T]) -> bool:
    """Whether `sequence` begins with all of `history` but one run of it, from where they first differ to some place before its end."""
    same, end = _shared(sequence, history), len(history)
    return any(list(sequence[same : same + end - cut]) == list(history[cut:]) for cut in range(same + 1, end))


def _shared(sequence: Sequence[T], history: Sequence[T]) -> int:
    """How many entries are the same from the start."""
    return next((n for n, (a, b) in enumerate(zip(sequence, history, strict=False)) if a != b), min(len(sequence), len(history)))


def _left_out(call: Call, other: Call) -> bool:
    """The same for tokens; the run ends before the reply."""
    history = np.concatenate([other.prompt, other.response])
    shorter = min(len(call.prompt), len(history))
    differ = np.flatnonzero(call.prompt[:shorter] != history[:shorter])
    same = int(differ[0]) if len(differ) else shorter
    if same >= len(call.prompt) or not len(other.response):
        return False
    cuts = same + 1 + np.flatnonzero(history[same + 1 : len(other.prompt) + 1] == call.prompt[same])
    ends = same + len(history) - cuts - 1  # where the last token of the reply would stand
    inside = ends < len(call.prompt)
    cuts = cuts[inside][call.prompt[ends[inside]] == history[-1]]
    rest, kept = call.prompt[same:].tobytes(), history.tobytes()
    return any(rest.startswith(kept[cut * history.itemsize :]) for cut in cuts.tolist())
