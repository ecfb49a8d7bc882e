"""Call numbers, budgets, retries, and what was said before (prefixes.py). Pure; the clock is handed in.

Bounded by forgetting attempts without a call under way: soon where they are over, earlier where there are too many. What was said is
bounded by itself: an attempt that says very much makes nobody else's be forgotten. After a day without a call only that is forgotten: an
attempt that comes back goes on counting, or it would have its whole budget again, and its earlier calls a process that nobody closed.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agl_otel.proxy.prefixes import MessagePrefixes, Prefix, TokenPrefixes
from agl_otel_hook.context import Key

MAX_ATTEMPTS: Final = 50_000
MAX_HELD: Final = 2_000_000  # and messages: some 300 MB
MAX_CLOSED: Final = 200_000  # attempts that are over and remembered as such: some 40 MB
CLOSED_SECONDS: Final = 600.0  # then nobody asks for the counts of an attempt that is over again
IDLE_SECONDS: Final = 86_400.0
MAX_TRIES: Final = 256  # the latest calls of an attempt, among which a retry's first try is looked for


class Try(NamedTuple):
    """A call's request, as it is remembered to tell what a retry repeats."""

    fingerprint: bytes
    wish: int
    good: bool | None = None


@dataclass(slots=True)
class Attempt:
    """What the proxy remembers of one attempt."""

    calls: int = 0
    active: int = 0
    held: int = 0
    """Replies and messages that are remembered."""
    tokens: int = 0
    """Tokens that the model wrote."""
    latest: float = 0.0
    """When its latest call began; infinite once it is idle."""
    said: TokenPrefixes = field(default_factory=TokenPrefixes)
    messages: MessagePrefixes = field(default_factory=MessagePrefixes)
    wishes: int = 0
    """Calls that the agent wanted: those that are no retries of others."""
    _tries: OrderedDict[int, Try] = field(default_factory=OrderedDict[int, "Try"])

    def tried(self, call: int, fingerprint: bytes, *, retry: bool) -> tuple[int | None, int]:
        """Note a call's request: (for a retry, the earlier call of the same request that it repeats, the number of the agent's wish).

        The earlier call is one that failed, else the only one there is: of several that went well nobody knows which is repeated. A retry
        is the same wish as what it repeats.
        """
        earlier = [(number, one) for number, one in self._tries.items() if one.fingerprint == fingerprint] if retry else []
        failed = [number for number, one in earlier if one.good is False]
        found = failed[-1] if failed else earlier[0][0] if len(earlier) == 1 else None
        self.wishes += found is None
        wish = self.wishes if found is None else self._tries.pop(found).wish
        self._tries[call] = Try(fingerprint, wish)
        if len(self._tries) > MAX_TRIES:
            self._tries.popitem(last=False)
        return found, wish

    def forget_said(self) -> int:
        """Later calls are stored whole; how much was remembered."""
        held = self.held
        self.said, self.messages, self.held = TokenPrefixes(), MessagePrefixes(), 0
        return held

    def rest(self) -> int:
        """Keep its numbers alone; how much was remembered of what it said."""
        self.latest = math.inf
        self._tries.clear()
        return self.forget_said()

    def ended(self, call: int, *, good: bool) -> None:
        """How the call went."""
        if call in self._tries:
            self._tries[call] = self._tries[call]._replace(good=good)


class Attempts:
    """All attempts that the proxy remembers; `forgotten` is called with one that it drops, `idle` with one that had no call for a day."""

    def __init__(
        self,
        forgotten: Callable[[Key], None],
        *,
        idle: Callable[[Key], None] = lambda _: None,
        max_attempts: int = MAX_ATTEMPTS,
        max_held: int = MAX_HELD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forgotten = forgotten
        self._idle = idle
        self._clock = clock
        self._max_attempts = max_attempts
        self._max_held = max_held
        self._attempts: OrderedDict[Key, Attempt] = OrderedDict()
        self._closed: OrderedDict[Key, float] = OrderedDict()
        """When each was closed; the earliest first."""
        self._held = 0

    def get(self, key: Key) -> Attempt | None:
        """The attempt, where it is remembered."""
        return self._attempts.get(key)

    def begin(self, key: Key, *, numbered: bool = True) -> tuple[Attempt, int]:
        """A call of the attempt starts; the attempt and the call's number, counted from 1, or 0 for one that takes none."""
        attempt = self._attempts.get(key)
        if attempt is None:
            self._make_room()
            attempt = self._attempts[key] = Attempt()
        self._attempts.move_to_end(key)
        attempt.calls += numbered
        attempt.active += 1
        attempt.latest = self._clock()
        return attempt, attempt.calls if numbered else 0

    def continued(self, attempt: Attempt, call: int, prompt: Sequence[int] | None, replies: Mapping[int, Sequence[int]]) -> Prefix | None:
        """Which earlier call the call's prompt continues (None also where token ids are missing); later ones may continue its replies."""
        if not prompt or not replies:
            return None
        self._hold(attempt, len(replies))
        return attempt.said.continued(call, prompt, replies)

    def remember(self, attempt: Attempt, call: int, digests: Sequence[bytes]) -> None:
        """Later calls may go on from the messages of this one, whose digests are given."""
        self._hold(attempt, attempt.messages.remember(call, digests))

    def _hold(self, attempt: Attempt, count: int) -> None:
        """Count what is remembered; where it is too much, those that said most lose it: their later calls are stored whole."""
        attempt.held += count
        self._held += count
        if self._held > self._max_held:
            for each in sorted(self._attempts.values(), key=lambda each: each.held, reverse=True):
                self._held -= each.forget_said()
                if self._held <= self._max_held * 7 // 8:  # not the same again with the next call
                    break

    def active(self, key: Key) -> int:
        """How many calls of the attempt are under way."""
        attempt = self._attempts.get(key)
        return attempt.active if attempt is not None else 0

    def close(self, key: Key) -> None:
        """The attempt is over."""
        self._closed[key] = self._clock()
        self._closed.move_to_end(key)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def expire(self) -> None:
        """Forget attempts that have been over for long enough (the queue knows them, too), and of idle ones what was said."""
        now = self._clock()
        while self._closed and next(iter(self._closed.values())) + CLOSED_SECONDS <= now:
            key, _ = self._closed.popitem(last=False)
            attempt = self._attempts.get(key)
            if attempt is None or not attempt.active:
                self._forget(key)
        for key, attempt in self._attempts.items():
            if not attempt.active and attempt.latest + IDLE_SECONDS <= now:
                self._held -= attempt.rest()
                self._idle(key)

    def is_closed(self, key: Key) -> bool:
        """Whether the attempt was closed here."""
        return key in self._closed

    def __len__(self) -> int:
        return len(self._attempts)

    def _make_room(self) -> None:
        while len(self._attempts) >= self._max_attempts:
            key = next((key for key, attempt in self._attempts.items() if not attempt.active), None)
            if key is None:
                return
            self._forget(key)

    def _forget(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        self._held -= attempt.held if attempt is not None else 0
        self._forgotten(key)
