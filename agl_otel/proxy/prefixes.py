"""What was said in an attempt so far, as hashes: which earlier call a prompt's tokens, and a request's messages, go on from. Pure.

A conversation's call repeats all that came before it. Naming the earlier call instead makes n calls cost n, not n². Kept is a digest of
16 bytes for each end of a reply and for each message, whatever their length, so that a process remembers very many attempts.
"""

from __future__ import annotations

import marshal
from array import array
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

DIGEST_BYTES: Final = 16
TRIED_FIRST: Final = 2  # of the longest: in a conversation the first of them is it
_MARSHAL_VERSION: Final = 2  # without references between objects, which depend on more than the values


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt starts with all of this (call, choice)'s prompt and reply: `length` tokens."""

    call: int
    choice: int
    length: int


class TokenPrefixes:
    """The ends of all replies, by length and digest of the tokens from the start of the prompt to there."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, tuple[int, int]]] = {}
        self._lengths: list[int] = []
        """The keys of `_seen`, in order."""

    def continued(self, call: int, prompt: Sequence[int], replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """The longest earlier (call, choice) that `prompt` goes on from; remembers this call's `replies` ({choice: token ids})."""
        ids = memoryview(array("i", prompt)).cast("B")
        best = self._longest(ids, len(prompt))
        whole = blake2b(ids, digest_size=DIGEST_BYTES)
        for choice, reply in replies.items():
            end = whole.copy()
            end.update(array("i", reply))
            length = len(prompt) + len(reply)
            if length not in self._seen:
                self._seen[length] = {}
                insort(self._lengths, length)
            self._seen[length].setdefault(end.digest(), (call, choice))
        return best

    def _longest(self, ids: memoryview, length: int) -> Prefix | None:
        """Each candidate is hashed by itself at first; where that does not find it, all lengths are gone through in one pass."""
        fitting = self._lengths[: bisect_right(self._lengths, length)]
        for candidate in fitting[: -TRIED_FIRST - 1 : -1]:
            if (found := self._seen[candidate].get(blake2b(ids[: 4 * candidate], digest_size=DIGEST_BYTES).digest())) is not None:
                return Prefix(*found, candidate)
        best: Prefix | None = None
        running, at = blake2b(digest_size=DIGEST_BYTES), 0
        for candidate in fitting[:-TRIED_FIRST]:
            running.update(ids[4 * at : 4 * candidate])
            at = candidate
            if (found := self._seen[candidate].get(running.digest())) is not None:
                best = Prefix(*found, candidate)
        return best


@dataclass(slots=True)
class MessagePrefixes:
    """Which call was the first whose messages began so, by the digest of the messages from the first to there."""

    _seen: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])

    def continued(self, kind: str, messages: Sequence[Any]) -> tuple[tuple[int, int] | None, list[bytes]]:
        """The earlier call of that kind that shares most with these messages (JSON values), and how many it shares; and the digests that
        `remember` takes. It is never all of them: the last message is stored with every call.
        """
        running = blake2b(kind.encode(), digest_size=DIGEST_BYTES)
        digests: list[bytes] = []
        for message in messages:
            running.update(marshal.dumps(message, _MARSHAL_VERSION))
            digests.append(running.digest())
        return next((found for digest in reversed(digests[:-1]) if (found := self._seen.get(digest)) is not None), None), digests

    def remember(self, call: int, digests: Sequence[bytes]) -> int:
        """The call's messages can be gone on from; how many of them nobody had said before."""
        before = len(self._seen)
        for count, digest in enumerate(digests, 1):
            self._seen.setdefault(digest, (call, count))
        return len(self._seen) - before
