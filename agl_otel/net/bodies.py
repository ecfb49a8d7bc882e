"""Read HTTP request bodies: count their bytes as received and as decompressed, and time out slow ones.

Servers of `make_runner` do not decompress, because that would happen before the bytes are counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohttp import web

from agl_otel.errors import UnavailableError
from agl_otel.net.compress import decompress, too_large
from agl_otel.net.http_server import Handler
from agl_otel.net.in_flight import Hold, InFlight

BODY_SECONDS: Final = 120.0  # 64 MiB over 5 Mbit/s
LONG_BYTES: Final = 64 << 10  # bodies of this size are converted in a thread
LARGE_BYTES: Final = 1 << 20  # bodies of this size have their own threads, so that slow ones do not delay the others
UNPACKING: Final = 3  # threads in each pool
_SMALL: Final = ThreadPoolExecutor(UNPACKING, thread_name_prefix="unpack")
_LARGE: Final = ThreadPoolExecutor(UNPACKING, thread_name_prefix="unpack-large")


class Bodies:
    """Reads the bodies of an application.

    Args:
        in_flight: counts the bytes in memory.
        limit: bytes of one decompressed body.
        seconds: timeout for receiving a body.
    """

    def __init__(self, in_flight: InFlight, limit: int, *, seconds: float = BODY_SECONDS) -> None:
        self.in_flight = in_flight
        self._limit = limit
        self._seconds = seconds

    @web.middleware
    async def held(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: the bytes that a handler reads with `body_of` stay reserved until it has answered."""
        with self.in_flight.growing() as hold:
            request[_READING] = (self, hold)
            return await handler(request)

    def whole(self, request: web.Request) -> bytes | None:
        """Return the body if all of it came with the head, as it did, and is not compressed. Raises TooLargeError."""
        return None if "Content-Encoding" in request.headers else self._arrived(request)

    def _arrived(self, request: web.Request) -> bytes | None:
        """Return the body as it came if all of it is there, the usual case. Raises TooLargeError."""
        if not request.content.is_eof():
            return None
        body = request.content.read_nowait()
        if len(body) > self._limit:
            raise too_large(self._limit)
        return body

    async def read(
        self, request: web.Request, hold: Hold, *, packed: bool = False, convert: Callable[[bytes], bytes] | None = None
    ) -> bytes:
        """Read the body, decompress it unless `packed` is set, and convert it; `hold` is called for each piece.

        Raises TooLargeError, EncodingError, DataError, and UnavailableError if it may be sent again.
        """
        if (request.content_length or 0) > self._limit:
            raise too_large(self._limit)
        body = await self._come(request, hold)
        encoding = "" if packed else request.headers.get("Content-Encoding", "")

        def unpack() -> bytes:
            plain = decompress(encoding, body, self._limit, hold=hold, disconnected=lambda: request.transport is None)
            return convert(plain) if convert is not None else plain

        if not encoding and (convert is None or len(body) < LONG_BYTES):
            return unpack()
        return await asyncio.get_running_loop().run_in_executor(_SMALL if len(body) < LARGE_BYTES else _LARGE, unpack)

    async def _come(self, request: web.Request, hold: Hold) -> bytes:
        if (body := self._arrived(request)) is not None:
            if body:
                hold(len(body))
            return body
        parts: list[bytes] = []
        size = 0

        def take(part: bytes) -> None:
            nonlocal size
            size += len(part)
            if size > self._limit:
                raise too_large(self._limit)
            hold(len(part))
            parts.append(part)

        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.content.iter_any():
                    take(part)
        except TimeoutError:
            raise UnavailableError(f"the body did not come within {self._seconds:.0f} s ({size} bytes did): send less at once") from None
        return b"".join(parts)


_READING: Final = web.RequestKey("reading", tuple[Bodies, Hold])


async def body_of(request: web.Request, *, packed: bool = False) -> bytes:
    """Read the body of a request, once; the application needs `Bodies.held`. Raises as `Bodies.read` does."""
    bodies, hold = request[_READING]
    return await bodies.read(request, hold, packed=packed)


async def json_of(request: web.Request) -> Any:
    """Read the body as JSON. Raises ValueError if it is not JSON."""
    return json.loads(await body_of(request))
