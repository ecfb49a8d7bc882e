"""Finds the reason why a call does not continue an earlier one: a pure rule over token ids, names and, if known, messages.

Tokens alone show that a prompt differs, not why. Messages do: if those of an earlier call and its reply are all present, but in other
tokens, the template or the tokeniser changed; otherwise the history was edited. Messages are read only for attempts with a break
(traces/reader.py), so intact conversations cost nothing.

All earlier calls are searched for one that this call repeats or continues (prefix_index.py). Edits and omissions need comparisons, so they
are searched only among the COMPARED_CALLS latest calls of the agent: an attempt may have ten thousand calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.prefix_index import Hashes, PrefixIndex
from agl_otel.types.bridges import UNBRIDGED

TokenIds = NDArray[np.int32]
T = TypeVar("T")
SYSTEM: Final = ("system", "developer")
"""Roles of messages that do not identify a conversation."""

COMPARED_CALLS: Final = 64
_LEAST_LINE: Final = 30  # characters: shorter lines are in many texts
_TAGS: Final = re.compile(r"</?\w+>")

SPLIT_REASONS: Final = {
    "choice": "a further choice of the same call (n > 1)",
    "branch": "it repeats an earlier prompt, or continues an earlier call that another call of its trajectory has continued already",
    "sub_agent": "another agent's call, or a separate conversation: no earlier one begins with the same message",
    "model_version": "it continues an earlier call, but another version of the weights answered",
    "template_drift": "it has all messages of an earlier call and its reply, unchanged, in other tokens: by the template or tokeniser, "
    "or by other tools",
    "truncated": "it leaves out a part of an earlier call, and keeps the rest up to its reply",
    "compacted": "under the instructions of an earlier call it is told an earlier reply, as after a compaction: the summary",
    "history_edited": "it keeps some messages of an earlier call, and changes others or the reply",
    "response_changed": "it starts with an earlier prompt, but not with the reply to it; its messages are unknown",
    "prompt_changed": "it does not start with an earlier prompt; its messages are unknown",
    "process": "the first call through another proxy process",
    **{f"unbridged_{why}": f"no bridge continued its conversation: {words}" for why, words in UNBRIDGED.items()},
}
"""Reasons why a call other than an attempt's first starts a new trajectory; the first that applies counts. That of a refused bridge
(docs/bridging.md) takes the place of _BRIDGEABLE."""
_BRIDGEABLE: Final = frozenset({"template_drift", "response_changed", "prompt_changed"})
"""What a bridge prevents, and what is said where messages are unknown, which the proxy has seen."""


@dataclass(frozen=True)
class Call:
    """One (call, choice) of an attempt, as seen by one proxy process."""

    row: int
    """Its row in the columns."""
    call: int
    prompt: TokenIds
    """The full prompt."""
    response: TokenIds
    agent: str = ""
    model_version: str = ""
    asked: tuple[str, ...] = ()
    """The messages of the prompt, each as "role: …"; empty if unknown."""
    answer: str = ""
    """The reply, in the same form."""
    unbridged: str = ""
    """The key of UNBRIDGED for which it was not bridged; empty if it was, or nothing was recorded."""


class EarlierCalls:
    """The earlier calls of an attempt, at most `capacity`."""

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

    def same_agent(self, call: Call) -> list[Call]:
        """Return the COMPARED_CALLS latest calls of the same agent."""
        return self._by_agent.get(call.agent, [])[-COMPARED_CALLS:]

    def bases(self, call: Call, hashes: Hashes) -> list[Call]:
        """Return the calls that it continues; `hashes` are its prompt's."""
        return [other for place in self._ends.of(hashes) if continues(call, other := self.calls[place])]

    def with_prompt_prefix(self, call: Call, hashes: Hashes) -> Iterator[Call]:
        """Return the calls of the same agent whose prompt is a prefix of its prompt, the latest first."""
        nothing = call.prompt[:0]
        found = (self.calls[place] for place in reversed(self._prompts.of(hashes)))
        return (other for other in found if other.agent == call.agent and starts_with(call.prompt, other.prompt, nothing))


def continues(call: Call, last: Call) -> bool:
    """Whether the prompt starts with the prompt and response of `last`. Choices of one call never continue each other."""
    return call.call != last.call and starts_with(call.prompt, last.prompt, last.response)


def starts_with(tokens: TokenIds, first: TokenIds, second: TokenIds) -> bool:
    """Whether `tokens` begins with `first` and then `second`."""
    middle, end = len(first), len(first) + len(second)
    return (
        len(tokens) >= end
        and (end == 0 or bool(tokens[end - 1] == (second[-1] if len(second) else first[-1])))  # a cheap test that most fail
        and np.array_equal(tokens[:middle], first)
        and np.array_equal(tokens[middle:end], second)
    )


def reason(call: Call, hashes: Hashes, tips: Sequence[Call], seen: EarlierCalls) -> str:
    """Return the key of SPLIT_REASONS for a call that starts a new trajectory; the arguments are those of `_found`."""
    found = _found(call, hashes, tips, seen)
    return f"unbridged_{call.unbridged}" if call.unbridged and found in _BRIDGEABLE else found


def _found(call: Call, hashes: Hashes, tips: Sequence[Call], seen: EarlierCalls) -> str:
    """Return the reason that tokens, names and messages show.

    Args:
        call: its number is at least that of the latest call before it.
        hashes: its prompt's.
        tips: the last calls of trajectories whose tokens it continues.
        seen: all calls before it; at least one.
    """
    same_agent = seen.same_agent(call)
    if seen.calls[-1].call == call.call:
        return "choice"
    if tips:
        return "model_version" if any(tip.agent == call.agent for tip in tips) else "sub_agent"
    if not same_agent:
        return "sub_agent"
    if any(len(other.prompt) == len(call.prompt) for other in seen.with_prompt_prefix(call, hashes)):
        return "branch"
    bases = seen.bases(call, hashes)
    if call.asked and (known := [other for other in same_agent if other.asked]):
        return _by_messages(call, known, bases)
    if bases:
        return "branch"
    if any(_left_out(call, other) for other in same_agent):
        return "truncated"
    return "response_changed" if any(True for _ in seen.with_prompt_prefix(call, hashes)) else "prompt_changed"


def _by_messages(call: Call, known: Sequence[Call], bases: Sequence[Call]) -> str:
    """Find the reason by messages; `bases` are the calls whose tokens it continues."""
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
    if any(_is_told(call, other) for other in known) and any(_same_instructions(call, other) for other in known):
        return "compacted"
    return "history_edited" if any(_opening(call.asked) == _opening(other.asked) for other in known) else "sub_agent"


def _shares(asked: Sequence[str], history: Sequence[str], kept: int) -> bool:
    """Whether both begin with the same `kept` messages and also share the next one or a later reply."""
    if asked[:kept] != history[:kept]:
        return False
    replies = {message for message in history[kept:] if message.startswith("assistant:")}
    return asked[kept : kept + 1] == history[kept : kept + 1] or not replies.isdisjoint(asked[kept:])


def _is_told(call: Call, other: Call) -> bool:
    """Whether messages that the model did not write have most lines of the other call's reply."""
    said = other.answer.partition(":")[2]
    lines = {line for line in map(str.strip, _TAGS.sub("\n", said).splitlines()) if len(line) >= _LEAST_LINE}
    given = [message for message in call.asked if not message.startswith("assistant:") and message not in other.asked]
    return bool(lines) and 2 * sum(any(line in message for message in given) for line in lines) >= len(lines)


def _same_instructions(call: Call, other: Call) -> bool:
    """Whether most lines are the same: some agents have a line there that changes with each conversation."""
    lines, others = (
        {line for message in each.asked[:1] if _is_of(message, SYSTEM) for line in message.splitlines()} for each in (call, other)
    )
    return 2 * len(lines & others) >= max(len(lines), len(others))


def _is_of(message: str, roles: Sequence[str]) -> bool:
    return message.partition(":")[0] in roles


def _opening(messages: Sequence[str]) -> str:
    """Return the first message that is not an instruction."""
    return next((message for message in messages if not _is_of(message, SYSTEM)), "")


def left_out(sequence: Sequence[T], history: Sequence[T]) -> bool:
    """Whether `sequence` begins with `history` minus one run, which starts at the first difference and ends before the last entry."""
    same, end = _shared(sequence, history), len(history)
    return any(list(sequence[same : same + end - cut]) == list(history[cut:]) for cut in range(same + 1, end))


def _shared(sequence: Sequence[T], history: Sequence[T]) -> int:
    """Return the length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(sequence, history, strict=False)) if a != b), min(len(sequence), len(history)))


def _left_out(call: Call, other: Call) -> bool:
    """Do the test of `left_out` on tokens; the run must end before the reply."""
    history = np.concatenate([other.prompt, other.response])
    shorter = min(len(call.prompt), len(history))
    differ = np.flatnonzero(call.prompt[:shorter] != history[:shorter])
    same = int(differ[0]) if len(differ) else shorter
    if same >= len(call.prompt) or not len(other.response):
        return False
    cuts = same + 1 + np.flatnonzero(history[same + 1 : len(other.prompt) + 1] == call.prompt[same])
    ends = same + len(history) - cuts - 1  # expected positions of the reply's last token
    inside = ends < len(call.prompt)
    cuts = cuts[inside][call.prompt[ends[inside]] == history[-1]]
    rest, kept = call.prompt[same:].tobytes(), history.tobytes()
    return any(rest.startswith(kept[cut * history.itemsize :]) for cut in cuts.tolist())
