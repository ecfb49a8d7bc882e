"""Call numbers, and which earlier call a prompt continues. Pure; bounded by forgetting attempts that have no call under way.

A conversation's prompt starts with an earlier call's prompt and reply. Naming that call instead of repeating its tokens makes a
conversation of n calls cost n, not n², tokens. What was said is kept as hashes: 100 bytes for each (call, choice), whatever its length.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from agl_otel.instrumentation.context import Key

MAX_ATTEMPTS: Final = 50_000
MAX_REPLIES: Final = 2_000_000  # some 200 MB
_ID_BYTES: Final = 8


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
    _seen: dict[int, dict[bytes, tuple[int, int]]] = field(default_factory=dict[int, dict[bytes, tuple[int, int]]])

    def continued(self, call: int, prompt: Sequence[int], replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """The longest earlier (call, choice) that `prompt` continues; remembers this call's `replies` ({choice: token ids})."""
        ids = memoryview(array("q", prompt)).cast("B")
        digest, at, best = blake2b(digest_size=16), 0, None
        for length in sorted(length for length in self._seen if length <= len(prompt)):
            digest.update(ids[at * _ID_BYTES : length * _ID_BYTES])
            at = length
            found = self._seen[length].get(digest.digest())
            if found is not None:
                best = Prefix(*found, length)
        digest.update(ids[at * _ID_BYTES :])
        for choice, reply in replies.items():
            whole = digest.copy()
            whole.update(array("q", reply))
            self._seen.setdefault(len(prompt) + len(reply), {}).setdefault(whole.digest(), (call, choice))
            self.replies += 1
        return best


class Attempts:
    """All attempts that the proxy remembers; `forgotten` is called with one that it drops."""

    def __init__(self, forgotten: Callable[[Key], None], *, max_attempts: int = MAX_ATTEMPTS, max_replies: int = MAX_REPLIES) -> None:
        self._forgotten = forgotten
        self._max_attempts = max_attempts
        self._max_replies = max_replies
        self._attempts: OrderedDict[Key, Attempt] = OrderedDict()
        self._replies = 0

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

    def __len__(self) -> int:
        return len(self._attempts)

    def _make_room(self) -> None:
        while len(self._attempts) >= self._max_attempts or self._replies > self._max_replies:
            key = next((key for key, attempt in self._attempts.items() if not attempt.active), None)
            if key is None:
                return
            self._replies -= self._attempts.pop(key).replies
            self._forgotten(key)
