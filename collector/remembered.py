"""The responses to recent requests, in memory: intake.py detects resends with them.

A plain response takes about 155 bytes, so that ten minutes of the requests that a collector can take fit. Responses are kept in
generations, each of a minute or of a fraction of the memory limit, and a generation is dropped as a whole: a time and links per entry would
double its size.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Final, TypeAlias

from agl_otel.collector.resends import MAX_REMEMBERED, RESEND_SECONDS, Outcome, PendingOutcome

ENTRY_BYTES: Final = 160
"""Size of a plain response: 48 bytes for its key, 32 for its position, the rest for its dictionary slot."""
MAX_BYTES: Final = MAX_REMEMBERED * ENTRY_BYTES
_OUTCOME_BYTES: Final = 160  # of an outcome with a message, without the message
_GENERATION_SECONDS: Final = RESEND_SECONDS / 10
_GENERATIONS: Final = 20  # minimum number, if all are full
_NOT_KEPT: Final = -1  # the position of a plain response that has none

_Kept: TypeAlias = int | Outcome | PendingOutcome


class _Generation:
    """Responses from a time on."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.bytes = 0
        self.answers: dict[int, _Kept] = {}


class Remembered:
    """Responses for ten minutes from receipt, and at most one minute longer. Beyond `max_bytes` the oldest are dropped earlier."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._generations: deque[_Generation] = deque()

    def __len__(self) -> int:
        return sum(len(each.answers) for each in self._generations)

    def forget_old(self, now: float) -> None:
        """Drop responses received more than ten minutes before `now`."""
        held = self._generations
        while held and (
            now - held[0].began_at > RESEND_SECONDS + _GENERATION_SECONDS or sum(each.bytes for each in held) > self._max_bytes
        ):
            held.popleft()

    def get(self, key: int) -> Outcome | PendingOutcome | None:
        """Return the response to the request with this key; None if the key is unknown."""
        for generation in reversed(self._generations):
            kept = generation.answers.get(key)
            if isinstance(kept, int):
                return Outcome(position=kept if kept != _NOT_KEPT else None)
            if kept is not None:
                return kept
        return None

    def put(self, key: int, at: float, answer: Outcome | PendingOutcome) -> None:
        """Store the response to a request received at `at`."""
        self._remove(key)
        last = self._generations[-1] if self._generations else None
        if last is None or at > last.began_at + _GENERATION_SECONDS or last.bytes > self._max_bytes // _GENERATIONS:
            last = _Generation(at)
            self._generations.append(last)
        kept, size = _small(answer)
        last.answers[key] = kept
        last.bytes += size

    def settle(self, key: int, outcome: Outcome) -> None:
        """Replace a key's pending outcome by its outcome; do nothing if the key has been dropped."""
        for generation in self._generations:
            if key in generation.answers:
                generation.answers[key], size = _small(outcome)
                generation.bytes += size - ENTRY_BYTES

    def forget(self, key: int) -> None:
        """Remove a key, so that the request counts as new when it is sent again."""
        self._remove(key)

    def _remove(self, key: int) -> None:
        for generation in self._generations:
            if (kept := generation.answers.pop(key, None)) is not None:
                generation.bytes -= _small(kept)[1]


def _small(answer: _Kept) -> tuple[_Kept, int]:
    """Return the compact form of a response, and its size in bytes."""
    if not isinstance(answer, Outcome):
        return answer, ENTRY_BYTES
    if not answer.rejected and not answer.message:
        return answer.position if answer.position is not None else _NOT_KEPT, ENTRY_BYTES
    return answer, ENTRY_BYTES + _OUTCOME_BYTES + sys.getsizeof(answer.message)
