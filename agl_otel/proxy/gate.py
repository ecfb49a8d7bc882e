"""The gate before the model servers: stops new calls while weights are replaced, and waits for the calls in flight.

A closed gate either holds calls until it opens or refuses them with 429 and Retry-After, which every SDK understands.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, Literal

from agl_otel.errors import RefusedError

Mode = Literal["hold", "refuse"]
HOLD_SECONDS: Final = 120.0  # a held call is refused after that, before its client times out
RETRY_SECONDS: Final = 1


class Gate:
    """Counts the calls that have passed. Use it in one event loop."""

    def __init__(self, *, hold_seconds: float = HOLD_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._mode: Mode | None = None
        self._mode_changed = asyncio.Event()
        self._changed = asyncio.Event()
        self.in_flight = 0
        self.held = 0

    @property
    def mode(self) -> Mode | None:
        """How the gate is closed; None while it is open."""
        return self._mode

    async def enter(self) -> None:
        """Wait until the call may proceed; each `enter` that returns needs a `leave`. Raises RefusedError."""
        if self._mode is not None:
            await self._wait()
        self.in_flight += 1

    def leave(self) -> None:
        """Count a call as ended."""
        self.in_flight -= 1
        self._changed.set()

    async def close(self, mode: Mode, *, wait_seconds: float) -> int:
        """Stop new calls and wait for those in flight; return how many are left after `wait_seconds`."""
        self._change(mode)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                while self.in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        return self.in_flight

    def open(self) -> None:
        """Open the gate; held calls proceed first."""
        self._change(None)

    def _change(self, mode: Mode | None) -> None:
        self._mode = mode
        changed, self._mode_changed = self._mode_changed, asyncio.Event()
        changed.set()

    async def _wait(self) -> None:
        deadline = self._clock() + self._hold_seconds
        self.held += 1
        try:
            while self._mode == "hold":
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    await self._mode_changed.wait()
        except TimeoutError:
            pass
        finally:
            self.held -= 1
        if self._mode is not None:
            raise RefusedError(
                "the model server is loading new weights: try again soon", status=429, code="paused", retry_seconds=RETRY_SECONDS
            )
