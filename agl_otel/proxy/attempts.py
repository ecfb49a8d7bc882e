"""Call numbers, budgets, retries, and which earlier call a prompt continues. Pure; bounded by forgetting attempts without a call under way.

A conversation's prompt starts with an earlier call's prompt and reply. Naming that call instead of repeating its tokens makes a
conversation of n calls cost n, not n², tokens. What was said is kept as hashes: some 150 bytes for each (call, choice), whatever its
length. The hash is multilinear, sum of id × random number of its position, twice in 64 bits: all prefixes of a prompt are hashed in one
vectorised pass, and the longest earlier reply is looked for first, so that the ten thousandth call costs about what the first one does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.instrumentation.context import Key

MAX_ATTEMPTS: Final = 50_000
MAX_REPLIES: Final = 2_000_000  # some 300 MB
MAX_CLOSED: Final = 200_000  # attempts that are over and remembered as such: some 40 MB
MAX_TRIES: Final = 256  # the latest calls of an attempt, among which a retry's first try is looked for
Hash = tuple[int, int]


class _Numbers:
    """Random odd numbers, two for each position; grown on demand."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._held = self._draw(1 << 12)

    def upto(self, length: int) -> NDArray[np.uint64]:
        """Shape (2, at least `length`)."""
        if length > self._held.shape[1]:
            self._held = np.concatenate([self._held, self._draw(max(length - self._held.shape[1], self._held.shape[1]))], axis=1)
        return self._held

    def _draw(self, count: int) -> NDArray[np.uint64]:
        return self._random.integers(0, 1 << 64, (2, count), dtype=np.uint64, endpoint=False) | np.uint64(1)


_numbers: Final = _Numbers()


def prefix_hashes(ids: Sequence[int], start: Hash = (0, 0), at: int = 0) -> NDArray[np.uint64]:
    """Shape (2, len(ids)): the hashes of the first 1, 2, … ids; `start` is the hash of the `at` ids that come before them."""
    values = np.frombuffer(array("q", ids), dtype=np.int64).astype(np.uint64) + np.uint64(1)  # so that a leading 0 counts
    terms = _numbers.upto(at + len(ids))[:, at : at + len(ids)] * values
    return np.cumsum(terms, axis=1, dtype=np.uint64) + np.array(start, dtype=np.uint64)[:, None]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt starts with all of this (call, choice)'s prompt and reply: `length` tokens."""

    call: int
    choice: int
    length: int


@dataclass(slots=True)
class Attempt:
    """What the proxy remembers of one attempt."""

    calls: int = 0
    active: int = 0
    replies: int = 0
    tokens: int = 0
    """Tokens that the model wrote."""
    _seen: dict[int, dict[Hash, tuple[int, int]]] = field(default_factory=dict[int, dict[Hash, tuple[int, int]]])
    _lengths: list[int] = field(default_factory=list[int])
    """The keys of `_seen`, in order."""
    _tries: OrderedDict[int, tuple[bytes, bool | None]] = field(default_factory=OrderedDict[int, tuple[bytes, bool | None]])

    def continued(self, call: int, prompt: Sequence[int], replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """The longest earlier (call, choice) that `prompt` continues; remembers this call's `replies` ({choice: token ids})."""
        hashes = prefix_hashes(prompt)
        best = None
        for place in range(bisect_right(self._lengths, len(prompt)) - 1, -1, -1):
            length = self._lengths[place]
            found = self._seen[length].get((int(hashes[0, length - 1]), int(hashes[1, length - 1])))
            if found is not None:
                best = Prefix(*found, length)
                break
        whole = (int(hashes[0, -1]), int(hashes[1, -1]))
        for choice, reply in replies.items():
            ends = prefix_hashes(reply, whole, len(prompt))
            digest = (int(ends[0, -1]), int(ends[1, -1])) if len(reply) else whole
            length = len(prompt) + len(reply)
            if length not in self._seen:
                self._seen[length] = {}
                insort(self._lengths, length)
            self._seen[length].setdefault(digest, (call, choice))
            self.replies += 1
        return best

    def tried(self, call: int, fingerprint: bytes, *, retry: bool) -> int | None:
        """Note a call's request; for a retry, the earlier call of the same request that it repeats.

        That is one that failed, else the only one there is: of several that went well nobody knows which is repeated.
        """
        earlier = [(number, good) for number, (held, good) in self._tries.items() if held == fingerprint] if retry else []
        self._tries[call] = (fingerprint, None)
        if len(self._tries) > MAX_TRIES:
            self._tries.popitem(last=False)
        failed = [number for number, good in earlier if good is False]
        found = failed[-1] if failed else earlier[0][0] if len(earlier) == 1 else None
        if found is not None:
            del self._tries[found]
        return found

    def ended(self, call: int, *, good: bool) -> None:
        """How the call went."""
        if call in self._tries:
            self._tries[call] = (self._tries[call][0], good)


class Attempts:
    """All attempts that the proxy remembers; `forgotten` is called with one that it drops."""

    def __init__(self, forgotten: Callable[[Key], None], *, max_attempts: int = MAX_ATTEMPTS, max_replies: int = MAX_REPLIES) -> None:
        self._forgotten = forgotten
        self._max_attempts = max_attempts
        self._max_replies = max_replies
        self._attempts: OrderedDict[Key, Attempt] = OrderedDict()
        self._closed: OrderedDict[Key, None] = OrderedDict()
        self._replies = 0

    def get(self, key: Key) -> Attempt | None:
        """The attempt, where it is remembered."""
        return self._attempts.get(key)

    def begin(self, key: Key) -> tuple[Attempt, int]:
        """A call of the attempt starts; the attempt and the call's number, counted from 1."""
        attempt = self._attempts.get(key)
        if attempt is None:
            self._make_room()
            attempt = self._attempts[key] = Attempt()
        self._attempts.move_to_end(key)
        attempt.calls += 1
        attempt.active += 1
        return attempt, attempt.calls

    def end(self, attempt: Attempt, call: int, prompt: Sequence[int] | None, replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """The call has ended; which earlier call its prompt continues (None also where token ids are missing)."""
        attempt.active -= 1
        if not prompt or not replies:
            return None
        self._replies += len(replies)
        return attempt.continued(call, prompt, replies)

    def active(self, key: Key) -> int:
        """How many calls of the attempt are under way."""
        attempt = self._attempts.get(key)
        return attempt.active if attempt is not None else 0

    def close(self, key: Key) -> None:
        """The attempt is over."""
        self._closed[key] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def is_closed(self, key: Key) -> bool:
        """Whether the attempt was closed here."""
        return key in self._closed

    def __len__(self) -> int:
        return len(self._attempts)

    def _make_room(self) -> None:
        while len(self._attempts) >= self._max_attempts or self._replies > self._max_replies:
            key = next((key for key, attempt in self._attempts.items() if not attempt.active), None)
            if key is None:
                return
            self._replies -= self._attempts.pop(key).replies
            self._forgotten(key)
