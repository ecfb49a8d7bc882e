"""Per-attempt state: call numbers, budgets, retries, message history (prefixes.py). Pure; the clock is injected.

Attempts without a call in flight are evicted: ten minutes after they are closed, earlier when there are too many. The history has a limit
of its own, and the attempts with the longest histories lose theirs first. After a day without a call only the history is dropped: the
counts stay, because a resumed attempt must neither get its whole budget again nor leave the process of its earlier calls without a seal.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from agl_otel.proxy.bridge import Bridge, Conversations
from agl_otel.proxy.prefixes import MessagePrefixes, Prefix, TokenPrefixes
from agl_otel.proxy.reply import Reply
from agl_otel_hook.context import Key

MAX_ATTEMPTS: Final = 50_000
MAX_HELD: Final = 2_000_000  # replies and messages: some 300 MB
MAX_CLOSED: Final = 200_000  # closed attempts that are remembered: some 40 MB
CLOSED_SECONDS: Final = 600.0  # the counts of a closed attempt are not requested again after that
IDLE_SECONDS: Final = 86_400.0
MAX_TRIES: Final = 256  # latest calls of an attempt, searched for the one that a retry repeats


class Try(NamedTuple):
    """The fingerprint of a call's request, to find which call a retry repeats."""

    fingerprint: bytes
    logical_number: int
    succeeded: bool | None = None


@dataclass(slots=True)
class Attempt:
    """State of one attempt."""

    calls: int = 0
    active: int = 0
    held: int = 0
    """Number of remembered replies and messages."""
    tokens: int = 0
    """Tokens sampled."""
    latest: float = 0.0
    """Start time of the latest call; infinite once the attempt is idle."""
    token_prefixes: TokenPrefixes = field(default_factory=TokenPrefixes)
    message_prefixes: MessagePrefixes = field(default_factory=MessagePrefixes)
    conversations: Conversations = field(default_factory=Conversations)
    logical_calls: int = 0
    """Logical calls: those that are not retries of others."""
    _tries: OrderedDict[int, Try] = field(default_factory=OrderedDict[int, "Try"])

    def record_request(self, call: int, fingerprint: bytes, *, retry: bool) -> tuple[int | None, int]:
        """Record a call's request; return (the earlier call that a retry repeats, if any, the logical call number).

        The earlier call has the same request; it is the latest that failed, else the only one. Among several that succeeded the repeated
        one is unknown (None). A retry has the logical call number of the call that it repeats.
        """
        earlier = [(number, one) for number, one in self._tries.items() if one.fingerprint == fingerprint] if retry else []
        failed = [number for number, one in earlier if one.succeeded is False]
        found = failed[-1] if failed else earlier[0][0] if len(earlier) == 1 else None
        self.logical_calls += found is None
        logical = self.logical_calls if found is None else self._tries.pop(found).logical_number
        self._tries[call] = Try(fingerprint, logical)
        if len(self._tries) > MAX_TRIES:
            self._tries.popitem(last=False)
        return found, logical

    def drop_history(self) -> int:
        """Drop the history, so that later calls are stored in full; return how many items were dropped."""
        held = self.held
        self.token_prefixes, self.message_prefixes, self.held = TokenPrefixes(), MessagePrefixes(), 0
        self.conversations = Conversations()
        return held

    def drop_all_but_counts(self) -> int:
        """Keep the counts only; return how many items of the history were dropped."""
        self.latest = math.inf
        self._tries.clear()
        return self.drop_history()

    def record_end(self, call: int, *, succeeded: bool) -> None:
        """Record whether the call succeeded."""
        if call in self._tries:
            self._tries[call] = self._tries[call]._replace(succeeded=succeeded)


class Attempts:
    """All known attempts; `forgotten` is called for each that is evicted, `idle` for each that had no call for a day."""

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
        """Closing times, earliest first."""
        self._held = 0

    def get(self, key: Key) -> Attempt | None:
        """Return the attempt, or None if it is unknown."""
        return self._attempts.get(key)

    def begin(self, key: Key, *, numbered: bool = True) -> tuple[Attempt, int]:
        """Start a call; return the attempt and the call's number, counted from 1, or 0 for a call without a number."""
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
        """Return the earlier call that the prompt continues (None also if token ids are missing), and index this call's replies."""
        if not prompt or not replies:
            return None
        self._hold(attempt, len(replies))
        return attempt.token_prefixes.continued(call, prompt, replies)

    def remember(self, attempt: Attempt, call: int, digests: Sequence[bytes]) -> None:
        """Index the messages of a call, given by their digests, so that later calls can refer to them."""
        self._hold(attempt, attempt.message_prefixes.remember(call, digests))

    def answered(self, attempt: Attempt, call: int, body: Mapping[str, Any], reply: Reply, bridge: Bridge) -> None:
        """Remember the answers of a call, so that later ones can continue them by a bridge."""
        self._hold(attempt, attempt.conversations.remember(call, body, reply, bridge))

    def _hold(self, attempt: Attempt, count: int) -> None:
        """Count remembered items; beyond the limit drop the longest histories, so that later calls of those attempts are stored in full."""
        attempt.held += count
        self._held += count
        if self._held > self._max_held:
            for each in sorted(self._attempts.values(), key=lambda each: each.held, reverse=True):
                self._held -= each.drop_history()
                if self._held <= self._max_held * 7 // 8:  # some slack, so that the next call does not sort again
                    break

    def active(self, key: Key) -> int:
        """Number of calls of the attempt in flight."""
        attempt = self._attempts.get(key)
        return attempt.active if attempt is not None else 0

    def close(self, key: Key) -> None:
        """Mark the attempt as closed."""
        self._closed[key] = self._clock()
        self._closed.move_to_end(key)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def expire(self) -> None:
        """Evict attempts closed long enough ago (the queue knows them, too), and drop the history of idle ones."""
        now = self._clock()
        while self._closed and next(iter(self._closed.values())) + CLOSED_SECONDS <= now:
            key, _ = self._closed.popitem(last=False)
            attempt = self._attempts.get(key)
            if attempt is None or not attempt.active:
                self._forget(key)
        for key, attempt in self._attempts.items():
            if not attempt.active and attempt.latest + IDLE_SECONDS <= now:
                self._held -= attempt.drop_all_but_counts()
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
