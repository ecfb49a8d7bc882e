"""Prefix index of an attempt: which earlier call a prompt's tokens, and a request's messages, continue. Pure.

Each call of a conversation repeats all that came before it. Storing a reference to the earlier call instead makes the storage of n calls
O(n), not O(n²). The index holds a 16-byte digest for each reply and for each message, whatever its length.
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
TRIED_FIRST: Final = 2  # longest candidates; in a conversation the first one matches
_MARSHAL_VERSION: Final = 2  # no references between objects, which depend on more than the values


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's prefix: the prompt and reply of this (call, choice), `length` tokens."""

    call: int
    choice: int
    length: int


class TokenPrefixes:
    """Index of all replies: by the length and the digest of prompt and reply together."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, tuple[int, int]]] = {}
        self._lengths: list[int] = []
        """The keys of `_seen`, sorted."""

    def continued(self, call: int, prompt: Sequence[int], replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """Return the longest earlier (call, choice) that `prompt` continues, and index this call's `replies` ({choice: token ids})."""
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
        """Find the longest match: hash the longest candidates one by one, then all other lengths in one pass."""
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
    """Index of message prefixes: the first call that had each, by the digest of its messages."""

    _seen: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])

    def continued(self, kind: str, messages: Sequence[Any]) -> tuple[tuple[int, int] | None, list[bytes]]:
        """Return ((call, count) of the earlier call of that kind with the longest common prefix of `messages`, digests for `remember`).

        `messages` are JSON values. The prefix never includes the last message, which is stored with every call.
        """
        running = blake2b(kind.encode(), digest_size=DIGEST_BYTES)
        digests: list[bytes] = []
        for message in messages:
            running.update(marshal.dumps(message, _MARSHAL_VERSION))
            digests.append(running.digest())
        return next((found for digest in reversed(digests[:-1]) if (found := self._seen.get(digest)) is not None), None), digests

    def remember(self, call: int, digests: Sequence[bytes]) -> int:
        """Index the call's messages; return how many prefixes are new."""
        before = len(self._seen)
        for count, digest in enumerate(digests, 1):
            self._seen.setdefault(digest, (call, count))
        return len(self._seen) - before
