"""Call numbers, budgets, retries, and what was said before (prefixes.py). Pure; bounded by forgetting attempts without a call under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agl_otel.instrumentation.context import Key
from agl_otel.proxy.prefixes import MessagePrefixes, Prefix, TokenPrefixes

MAX_ATTEMPTS: Final = 50_000
MAX_HELD: Final = 2_000_000  # and messages: some 300 MB
MAX_CLOSED: Final = 200_000  # attempts that are over and remembered as such: some 40 MB
MAX_TRIES: Final = 256  # the latest calls of an attempt, among which a retry's first try is looked for


@dataclass(slots=True)
class Attempt:
    """What the proxy remembers of one attempt."""

    calls: int = 0
    active: int = 0
    held: int = 0
    """Replies and messages that are remembered."""
    tokens: int = 0
    """Tokens that the model wrote."""
    said: TokenPrefixes = field(default_factory=TokenPrefixes)
    messages: MessagePrefixes = field(default_factory=MessagePrefixes)
    _tries: OrderedDict[int, tuple[bytes, bool | None]] = field(default_factory=OrderedDict[int, tuple[bytes, bool | None]])

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

    def __init__(self, forgotten: Callable[[Key], None], *, max_attempts: int = MAX_ATTEMPTS, max_held: int = MAX_HELD) -> None:
        self._forgotten = forgotten
        self._max_attempts = max_attempts
        self._max_held = max_held
        self._attempts: OrderedDict[Key, Attempt] = OrderedDict()
        self._closed: OrderedDict[Key, None] = OrderedDict()
        self._held = 0

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
        self._hold(attempt, len(replies))
        return attempt.said.continued(call, prompt, replies)

    def remember(self, attempt: Attempt, call: int, digests: Sequence[bytes]) -> None:
        """Later calls may go on from the messages of this one, whose digests are given."""
        self._hold(attempt, attempt.messages.remember(call, digests))

    def _hold(self, attempt: Attempt, count: int) -> None:
        attempt.held += count
        self._held += count

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
        while len(self._attempts) >= self._max_attempts or self._held > self._max_held:
            key = next((key for key, attempt in self._attempts.items() if not attempt.active), None)
            if key is None:
                return
            self._held -= self._attempts.pop(key).held
            self._forgotten(key)
