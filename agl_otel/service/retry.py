"""Retry with back-off: how long to wait between tries, and when to give up.

`Backoff` and `Tries` are the policy, without I/O; `retry` is an async loop over it. Threads, and loops that handle several kinds of
failure, call `Tries.pause` and wait themselves.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from agl_otel.errors import UnavailableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first_seconds` to `longest_seconds`.

    `jitter` is the random share of each pause, so that callers that failed together do not retry together. 0.5 is AWS's equal jitter, 1.0
    its full jitter (Brooker, "Exponential Backoff And Jitter", 2015).
    """

    first_seconds: float
    longest_seconds: float
    jitter: float = 0.5

    def seconds(self, failures: int) -> float:
        """Return the pause after so many failures in a row, without jitter; 0 after none."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 60), self.longest_seconds) if failures > 0 else 0.0

    def jittered(self, failures: int) -> float:
        """Return the pause with jitter."""
        return self.seconds(failures) * random.uniform(1.0 - self.jitter, 1.0)


QUICK: Final = Backoff(0.05, 1.0)
"""For a service that may be restarting while a caller waits."""


class Tries:
    """The tries of one call: at most `limit`, none beginning later than `seconds` from now (None: no bound)."""

    def __init__(
        self, backoff: Backoff, *, seconds: float | None = None, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backoff, self._limit, self._clock = backoff, limit, clock
        self._until = None if seconds is None else clock() + seconds
        self.failures = 0

    def pause(self, *, at_least: float = 0.0) -> float | None:
        """Count a failure; return the seconds to wait before the next try (`at_least`: as a server asked for), or None to give up."""
        self.failures += 1
        if self._limit is not None and self.failures >= self._limit:
            return None
        pause = max(self._backoff.jittered(self.failures), at_least)
        return None if self._until is not None and self._clock() + pause > self._until else pause


async def retry(
    ask: Callable[[], Awaitable[T]],
    backoff: Backoff = QUICK,
    *,
    seconds: float | None = None,
    limit: int | None = None,
    on: type[Exception] = UnavailableError,
    first_failure: Callable[[Exception], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Call `ask` until it does not raise `on`, at most `limit` times or for `seconds` (both None: for ever). Raises the last error.

    `first_failure` is called with the first error if another try follows.
    """
    tries = Tries(backoff, seconds=seconds, limit=limit, clock=clock)
    while True:
        try:
            return await ask()
        except on as error:
            if (pause := tries.pause()) is None:
                raise
            if tries.failures == 1 and first_failure is not None:
                first_failure(error)
        await sleep(pause)
