"""The answers to recent requests in memory, by which intake.py knows a resend. A plain one takes some 155 bytes, so that ten minutes of
the requests that a collector can take fit.

They are in generations of a minute, or of a part of what may be held; a generation is forgotten as a whole, because an entry that had a
time and neighbours of its own would take twice as much.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Final, TypeAlias

from agl_otel.collector.resends import MAX_REMEMBERED, RESEND_SECONDS, Outcome

ENTRY_BYTES: Final = 160
"""Of a plain answer: 64 of its key, 32 of its position, the rest of its place in a dictionary."""
MAX_BYTES: Final = MAX_REMEMBERED * ENTRY_BYTES
_OUTCOME_BYTES: Final = 160  # of an outcome with a message, beside the message
_GENERATION_SECONDS: Final = RESEND_SECONDS / 10
_GENERATIONS: Final = 20  # at least so many, where all are full
_NOT_KEPT: Final = -1  # the position of a plain answer without one

_Kept: TypeAlias = "int | Outcome | asyncio.Future[Outcome]"


class _Generation:
    """What was answered from a time on."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.bytes = 0
        self.answers: dict[bytes, _Kept] = {}


class Remembered:
    """Answers for ten minutes from their receipt, and at most a minute longer. Beyond `max_bytes` the oldest are forgotten earlier."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._generations: deque[_Generation] = deque()

    def __len__(self) -> int:
        return sum(len(each.answers) for each in self._generations)

    def forget_old(self, now: float) -> None:
        """Forget what was received more than ten minutes before `now`."""
        held = self._generations
        while held and (
            now - held[0].began_at > RESEND_SECONDS + _GENERATION_SECONDS or sum(each.bytes for each in held) > self._max_bytes
        ):
            held.popleft()

    def get(self, key: str) -> Outcome | asyncio.Future[Outcome] | None:
        """The answer to the request that this key tells, or what will be; None where it is not known."""
        packed = _packed(key)
        for generation in reversed(self._generations):
            kept = generation.answers.get(packed)
            if isinstance(kept, int):
                return Outcome(position=kept if kept != _NOT_KEPT else None)
            if kept is not None:
                return kept
        return None

    def put(self, key: str, at: float, answer: Outcome | asyncio.Future[Outcome]) -> None:
        """Remember the answer to a request received at `at`."""
        packed = _packed(key)
        self._remove(packed)
        last = self._generations[-1] if self._generations else None
        if last is None or at > last.began_at + _GENERATION_SECONDS or last.bytes > self._max_bytes // _GENERATIONS:
            last = _Generation(at)
            self._generations.append(last)
        kept, size = _small(answer)
        last.answers[packed] = kept
        last.bytes += size

    def settle(self, key: str, outcome: Outcome) -> None:
        """Put the outcome in the place of what it was waited for by; nothing where that is forgotten."""
        packed = _packed(key)
        for generation in self._generations:
            if packed in generation.answers:
                generation.answers[packed], size = _small(outcome)
                generation.bytes += size - ENTRY_BYTES

    def forget(self, key: str) -> None:
        """Take a request for new when it comes again."""
        self._remove(_packed(key))

    def _remove(self, packed: bytes) -> None:
        for generation in self._generations:
            if (kept := generation.answers.pop(packed, None)) is not None:
                generation.bytes -= _small(kept)[1]


def _packed(key: str) -> bytes:
    """A key of intake.py, a letter and hexadecimal digits, in half the bytes."""
    return key[:1].encode() + bytes.fromhex(key[1:])


def _small(answer: _Kept) -> tuple[_Kept, int]:
    """What is held of an answer, and its bytes."""
    if not isinstance(answer, Outcome):
        return answer, ENTRY_BYTES
    if not answer.rejected and not answer.message:
        return answer.position if answer.position is not None else _NOT_KEPT, ENTRY_BYTES
    return answer, ENTRY_BYTES + _OUTCOME_BYTES + sys.getsizeof(answer.message)
