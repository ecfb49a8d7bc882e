"""How many bytes of requests may be on their way between the socket and the disk."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from agl_otel.errors import UnavailableError


class InFlight:
    """Counts bytes that are held; lives on the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        """Held at this moment."""
        self.refused = 0
        """Requests that found no room."""

    @contextmanager
    def hold(self, size: int) -> Generator[None]:
        """Hold `size` bytes for as long as the block runs; one request alone is always let in.

        Raises UnavailableError where there is no room.
        """
        with self.growing() as more:
            more(size)
            yield

    @contextmanager
    def growing(self) -> Generator[Callable[[int], None]]:
        """Hold what is asked for piece by piece, for as long as the block runs: what a client only announces holds nobody up."""
        held = 0

        def more(size: int) -> None:
            nonlocal held
            if self.bytes > held and self.bytes + size > self.limit:
                self.refused += 1
                raise UnavailableError(
                    f"{self.bytes} bytes of requests wait for the disk already (AGL_MAX_IN_FLIGHT_BYTES {self.limit}): send it again later"
                )
            held += size
            self.bytes += size

        try:
            yield more
        finally:
            self.bytes -= held
