"""How many bytes of requests a service holds at one time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from agl_otel.errors import UnavailableError

Hold = Callable[[int], None]
"""Holds so many bytes more. Raises UnavailableError where there is no room, or where what they are held for is over."""


class InFlight:
    """Counts bytes that are held; in any thread. `setting` is the variable that `limit` comes from, for errors."""

    def __init__(self, limit: int, setting: str = "AGL_MAX_IN_FLIGHT_BYTES") -> None:
        self.limit = limit
        self.bytes = 0
        """Held at this moment."""
        self.refused = 0
        """Requests that found no room."""
        self._setting = setting
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, size: int) -> Generator[None]:
        """Hold `size` bytes for as long as the block runs; one request alone is always let in.

        Raises UnavailableError where there is no room.
        """
        with self.growing() as more:
            more(size)
            yield

    @contextmanager
    def growing(self) -> Generator[Hold]:
        """Hold what is asked for piece by piece, for as long as the block runs: what a client only announces holds nobody up."""
        held = 0
        over = False

        def more(size: int) -> None:
            nonlocal held
            with self._lock:
                if over:
                    raise UnavailableError("nobody waits for this request any more")
                if self.bytes > held and self.bytes + size > self.limit:
                    self.refused += 1
                    raise UnavailableError(
                        f"{self.bytes} bytes of requests are being taken already ({self._setting} {self.limit}): send it again later"
                    )
                held += size
                self.bytes += size

        try:
            yield more
        finally:
            with self._lock:
                over = True
                self.bytes -= held
