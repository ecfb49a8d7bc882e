"""Answer small POST requests ahead of aiohttp, which needs some 50 µs of CPU more for each.

Only what is beyond doubt is answered here: one of some paths, HTTP/1.1, a body of known length, headers in plain characters, each once.
With any other request the connection becomes aiohttp's, from the first byte of that request on: one place judges what is odd about HTTP.
Only a client that begins to speak HTTP/2 is answered here as well: aiohttp's parser takes its preface for a malformed request.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, cast

LARGEST_BYTES: Final = 64 << 10
"""The largest body taken here."""
_HEAD_BYTES: Final = 8190  # aiohttp's limit for one header
_HEADERS: Final = re.compile(r"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e]*)+")
"""The headers of a message, each after a line break: names are tokens, values have printable ASCII characters and tabs."""
_LENGTH: Final = re.compile(r"[0-9]{1,5}")
AIOHTTPS: Final = frozenset(
    {
        *("transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te", "origin", "referer", "sec-fetch-site"),
        *("proxy-connection", "keep-alive", "http2-settings"),
    }
)
"""Headers of requests that are not answered here: other bodies, other protocols, and those of browsers."""
_MOST_HEADERS: Final = 100
_LOOK_SECONDS: Final = 0.01
_FLUSH_SECONDS: Final = 60.0  # in which a client that is left reads a part of its last responses
_LINGER_SECONDS: Final = 1.0  # for a client of HTTP/2 to close
_PART_SECONDS: Final = 0.2
"""After this time a request of which only a part has come is aiohttp's, too, which bounds the time and counts the bytes of slow ones."""


SAME_ORIGIN: Final = "Cross-Origin-Resource-Policy: same-origin"
"""A header of each response: pages of other origins may not load it, for example as an image or a script."""


class SmallRequest(NamedTuple):
    """A POST request."""

    path: str
    headers: Mapping[str, str]
    """Names are in lower case."""
    body: bytes


class Client(Protocol):
    """The way back to the client of a request."""

    gone: Callable[[], object] | None
    """Called if the client disconnects before its response is complete. With None the client may close its side after the request."""

    def reply(self, answer: bytes) -> None:
        """Send the whole response, or its last part."""
        ...

    def write(self, part: bytes) -> None:
        """Send a part of the response that is not the last."""
        ...

    def is_closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        ...

    def buffered(self) -> int:
        """Number of bytes that were written and not sent yet."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read enough of what was written. Raises ConnectionResetError if it has disconnected."""
        ...

    def break_off(self) -> None:
        """Close the connection before the response is complete, after what was written."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


Take = Callable[[SmallRequest, Client], bool]
"""Takes a request, and responds to the client now or later; returns False, having done nothing, to leave it to aiohttp.

It runs on the event loop, and no body is counted before it: what takes long, or grows (a compressed body), is left to aiohttp."""

RefuseHttp2 = Callable[[], str]
"""Returns what to tell a client that speaks HTTP/2."""
HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every HTTP/2 client (RFC 9113, section 3.4)."""


class NotSimpleError(Exception):
    """The request is not one to be answered here."""


def response(status: str, body: bytes, *headers: str) -> bytes:
    """Build a response: `status` is code and reason, each of `headers` a whole line."""
    return head(status, [*headers, f"Content-Length: {len(body)}", f"Date: {date()}", SAME_ORIGIN]) + body


def head(status: str, headers: Iterable[str]) -> bytes:
    """Build the head of a response, as `response` does, with no other headers."""
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode(errors="surrogateescape")


def date() -> str:
    """The time, as the Date of a response has it."""
    return _date(int(time.time()))


@lru_cache(1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def read_head(data: bytes, start: bytes) -> tuple[str, list[str], int] | None:
    """Read the head of the message that `data` begins with, if it begins with `start`: (first line, lines of headers, start of the body).

    Returns None if more must come. Raises NotSimpleError for a head that is too long, or not in plain characters.
    """
    end = data.find(b"\r\n\r\n", 0, _HEAD_BYTES)
    if end < 0:
        if len(data) >= _HEAD_BYTES or not data.startswith(start[: len(data)]):
            raise NotSimpleError
        return None
    head = data[:end].decode("latin-1")
    line_end = head.find("\r\n")
    if _HEADERS.fullmatch(head, line_end) is None:
        raise NotSimpleError
    lines = head[line_end + 2 :].split("\r\n")
    if len(lines) > _MOST_HEADERS:
        raise NotSimpleError
    return head[:line_end], lines, end + 4


def read_request(data: bytes, has_path: Callable[[str], bool]) -> tuple[SmallRequest, int] | None:
    """Read the request that `data` begins with: (request, its length), or None if more must come. Raises NotSimpleError."""
    if (found := read_head(data, b"POST /")) is None:
        return None
    first, lines, begin = found
    line = first.split(" ")
    if len(line) != 3 or line[0] != "POST" or not has_path(line[1]) or line[2] != "HTTP/1.1":
        raise NotSimpleError
    headers = {name.lower(): value.strip(" \t") for name, _, value in (each.partition(":") for each in lines)}
    length = headers.get("content-length", "")
    if len(headers) != len(lines) or "host" not in headers or not AIOHTTPS.isdisjoint(headers) or _LENGTH.fullmatch(length) is None:
        raise NotSimpleError
    if int(length) > LARGEST_BYTES or headers.get("connection", "keep-alive").lower() != "keep-alive":
        raise NotSimpleError
    if len(data) < begin + int(length):
        return None
    return SmallRequest(line[1], headers, data[begin : begin + int(length)]), begin + int(length)


class Front:
    """The protocol factory of a port.

    Args:
        has_path: whether `take` may take a request for a path.
        refuse_http2: called for each client that speaks HTTP/2.
        behind: makes aiohttp's protocol.
        idle_seconds: time in which a request must have come, from the start of the connection or the last response.
    """

    def __init__(
        self,
        has_path: Callable[[str], bool],
        take: Take,
        refuse_http2: RefuseHttp2,
        behind: Callable[[], asyncio.Protocol],
        *,
        idle_seconds: float,
    ) -> None:
        self.has_path = has_path
        self.take = take
        self.refuse_http2 = refuse_http2
        self.behind = behind
        self.idle_seconds = idle_seconds
        self.connections: set[_Connection] = set()

    def __call__(self) -> asyncio.Protocol:
        """Make the protocol of a connection."""
        return _Connection(self)

    async def close(self, timeout_seconds: float) -> None:
        """Close the connections, each after the response to the request that it has sent."""
        for connection in [*self.connections]:
            connection.end()
        deadline = time.monotonic() + timeout_seconds
        while self.connections and time.monotonic() < deadline:  # noqa: ASYNC110 - the last response may be any connection's
            await asyncio.sleep(_LOOK_SECONDS)
        for connection in [*self.connections]:
            connection.abort()


class _Connection(asyncio.Protocol):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._data = b""
        self._first = True
        """Whether no request has been taken yet."""
        self._refused = False
        self._taken = False
        """Whether a request has been taken whose response is not complete."""
        self.gone: Callable[[], object] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._reading = self._full = self._paused = self._ending = self._over = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses
        self._front.connections.add(self)
        self._loop = asyncio.get_running_loop()
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._front.idle_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._resume()
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()

    def eof_received(self) -> bool:
        """Keep the connection for the responses that are due, unless their maker watches the client; TLS does not allow it."""
        self._over = True
        return self._taken and self.gone is None and self._transport.get_extra_info("sslcontext") is None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._data = self._data + data if self._data else data
        self._read()
        if len(self._data) > LARGEST_BYTES + _HEAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._resume()
        self._read()

    def end(self) -> None:
        """Close now, or after the response that is due."""
        self._ending = True
        if not self._taken:
            self._close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def break_off(self) -> None:
        """Close the connection before the response is complete, after what was written."""
        self._taken, self.gone = False, None
        self._close()

    def write(self, part: bytes) -> None:
        """Send a part of the response that is not the last."""
        if not self._transport.is_closing():
            self._transport.write(part)

    def is_closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        return self._transport.is_closing()

    def buffered(self) -> int:
        """Number of bytes that were written and not sent yet."""
        return self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Wait until the client has read enough of what was written. Raises ConnectionResetError if it has disconnected."""
        if self._full and not self._transport.is_closing():
            self._drained = self._loop.create_future()
            await self._drained
        if self._transport.is_closing():
            raise ConnectionResetError("the client went away before its answer")

    def reply(self, answer: bytes) -> None:
        """Send the whole response, or its last part."""
        self._taken, self.gone = False, None
        if self._transport.is_closing():
            return
        self._transport.write(answer)
        self._since = self._loop.time()
        if self._ending:
            self._close()
        elif (self._data or self._over or self._paused) and not self._reading:
            self._read()

    def _resume(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def _read(self) -> None:
        """Take requests until one has no response yet."""
        if self._reading:
            return
        self._reading = True
        part = False
        while self._data and not (part or self._taken or self._full or self._ending or self._transport.is_closing()):
            part = not self._take_next()
        self._reading = False
        if self._late is not None and not part:
            self._late.cancel()
            self._late = None
        elif self._late is None and part and self._data:
            self._late = self._loop.call_later(_PART_SECONDS, self._hand_over)
        if self._over and not self._taken:
            self._close()
        elif self._paused and not (self._taken or self._full):
            self._paused = False
            self._transport.resume_reading()

    def _take_next(self) -> bool:
        """Take the next request, or hand the connection over; return whether it was there as a whole."""
        try:
            found = read_request(self._data, self._front.has_path)
        except NotSimpleError:
            if self._first and self._data.startswith(HTTP2_PREFACE):
                self._refuse_http2()
                return True
            if self._first and HTTP2_PREFACE.startswith(self._data):
                return False
            self._hand_over()
            return True
        if found is None:
            return False
        request, length = found
        whole, self._data = self._data, self._data[length:]
        self._taken, self._first = True, False
        if not self._front.take(request, self):
            self._taken, self._data = False, whole
            self._hand_over()
        return True

    def _refuse_http2(self) -> None:
        """Answer in HTTP/1.1, which clients of HTTP/2 recognise, and close once the client has, so that no reset overtakes the answer."""
        self._data, self._refused = b"", True
        text = f"{self._front.refuse_http2()}\n".encode()
        self._transport.write(response("400 Bad Request", text, "Content-Type: text/plain; charset=utf-8", "Connection: close"))
        self._loop.call_later(_LINGER_SECONDS, self._close)

    def _hand_over(self) -> None:
        if self._transport.is_closing():
            return
        data, paused = self._data, self._paused
        self._leave()
        protocol = self._front.behind()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if paused:
            self._transport.resume_reading()
        protocol.data_received(data)

    def _leave(self) -> None:
        """Forget the connection: it is lost, or aiohttp's."""
        self._data, self._paused = b"", False
        self._timer.cancel()
        if self._late is not None:
            self._late.cancel()
        self._front.connections.discard(self)

    def _close(self, unsent: float = math.inf) -> None:
        """Close, after the client has read the last responses; without them if it reads nothing for _FLUSH_SECONDS."""
        self._transport.close()
        left = self.buffered()
        if left and left >= unsent:
            self._transport.abort()
        elif left:
            self._loop.call_later(_FLUSH_SECONDS, self._close, left)

    def _look(self) -> None:
        """Close the connection if no request has come for too long."""
        left = self._since + self._front.idle_seconds - self._loop.time()
        if self._taken or left > 0:
            self._timer = self._loop.call_later(self._front.idle_seconds if self._taken else left, self._look)
        else:
            self._close()
