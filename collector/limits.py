"""How many bytes of requests may be on their way between the socket and the disk."""

from __future__ import annotations

from collections.abc import Generator
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
        if self.bytes and self.bytes + size > self.limit:
            self.refused += 1
            raise UnavailableError(
                f"{self.bytes} bytes of requests wait for the disk already (AGL_MAX_IN_FLIGHT_BYTES {self.limit}): send it again later"
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size
