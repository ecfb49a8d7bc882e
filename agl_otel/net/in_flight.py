"""Limit on the request bytes that a service holds at one time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from agl_otel.errors import UnavailableError

Hold = Callable[[int], None]
"""Reserves more bytes. Raises UnavailableError if there is no room, or if the block of `growing` has ended."""


class InFlight:
    """Counts reserved bytes; thread-safe. `setting` is the variable that sets `limit`, for errors."""

    def __init__(self, limit: int, setting: str = "AGL_MAX_IN_FLIGHT_BYTES") -> None:
        self.limit = limit
        self.bytes = 0
        """Bytes reserved now."""
        self.refused = 0
        """Number of refused requests."""
        self._setting = setting
        self._lock = threading.Lock()

    def reserve(self, size: int, held: int = 0) -> None:
        """Reserve `size` more bytes until `release`; `held` are reserved for this request already. A single request is always admitted.

        Raises UnavailableError if there is no room.
        """
        with self._lock:
            if self.bytes > held and self.bytes + size > self.limit:
                self.refused += 1
                raise UnavailableError(
                    f"{self.bytes} bytes of requests are being taken already ({self._setting} {self.limit}): send it again later"
                )
            self.bytes += size

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        with self._lock:
            self.bytes -= size

    @contextmanager
    def growing(self) -> Generator[Hold]:
        """Reserve bytes piece by piece, until the block ends, so that a merely announced length reserves nothing."""
        held = 0
        over = False
        lock = threading.Lock()

        def more(size: int) -> None:
            nonlocal held
            with lock:
                if over:
                    raise UnavailableError("nobody waits for this request any more")
                self.reserve(size, held)
                held += size

        try:
            yield more
        finally:
            with lock:
                over = True
            self.release(held)
