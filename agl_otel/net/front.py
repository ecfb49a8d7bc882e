"""Answer small, whole POST requests ahead of aiohttp, which needs twice the CPU for them.

Only what is beyond doubt is answered here: one of some paths, HTTP/1.1, a body of known length, headers in plain characters, each once.
With any other request the connection becomes aiohttp's, from the first byte of that request on: one place judges what is odd about HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Final, NamedTuple

LARGEST_BYTES: Final = 64 << 10
"""The largest body taken here."""
_HEAD_BYTES: Final = 16 << 10
_HEADERS: Final = re.compile(r"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e]*)+")
_LENGTH: Final = re.compile(r"[0-9]{1,5}")
_AIOHTTPS: Final = frozenset(
    {"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te", "origin", "referer", "sec-fetch-site"}
)
"""Headers of requests that are not answered here: other bodies, other protocols, and those of browsers."""
_LOOK_SECONDS: Final = 0.01


class SmallRequest(NamedTuple):
    """A POST request. Names of `headers` are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


Reply = Callable[[bytes], None]
Take = Callable[[SmallRequest, Reply], bool]
"""Takes a request and calls `Reply` once, now or later, with the response; returns False, having done nothing, to leave it to aiohttp."""


class NotSimpleError(Exception):
    """The request is not one to be answered here."""


def response(status: str, body: bytes, *headers: str) -> bytes:
    """Build a response: `status` is code and reason, each of `headers` a whole line."""
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", f"Date: {_date(int(time.time()))}")
    return "\r\n".join((*lines, "Cross-Origin-Resource-Policy: same-origin", "", "")).encode("latin-1") + body


@lru_cache(1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def read_request(data: bytes, paths: Collection[str]) -> tuple[SmallRequest, int] | None:
    """Read the request that `data` begins with: (request, its length), or None if more must come. Raises NotSimpleError."""
    end = data.find(b"\r\n\r\n", 0, _HEAD_BYTES)
    if end < 0:
        if len(data) >= _HEAD_BYTES or not data.startswith(b"POST /"[: len(data)]):
            raise NotSimpleError
        return None
    head = data[:end].decode("latin-1")
    line_end = head.find("\r\n")
    line = head[:line_end].split(" ")
    if len(line) != 3 or line[0] != "POST" or line[1] not in paths or line[2] != "HTTP/1.1" or _HEADERS.fullmatch(head, line_end) is None:
        raise NotSimpleError
    lines = head[line_end + 2 :].split("\r\n")
    headers = {name.lower(): value.strip(" \t") for name, _, value in (each.partition(":") for each in lines)}
    length = headers.get("content-length", "")
    if len(headers) != len(lines) or "host" not in headers or not _AIOHTTPS.isdisjoint(headers) or _LENGTH.fullmatch(length) is None:
        raise NotSimpleError
    if int(length) > LARGEST_BYTES or headers.get("connection", "keep-alive").lower() != "keep-alive":
        raise NotSimpleError
    begin = end + 4
    if len(data) < begin + int(length):
        return None
    return SmallRequest(line[1], headers, data[begin : begin + int(length)]), begin + int(length)


class Front:
    """The protocol factory of a port.

    Args:
        paths: those of the requests that `take` may take.
        behind: makes aiohttp's protocol.
        idle_seconds: time in which a request must have come, from the start of the connection or the last response.
    """

    def __init__(self, paths: Collection[str], take: Take, behind: Callable[[], asyncio.Protocol], *, idle_seconds: float) -> None:
        self.paths = frozenset(paths)
        self.take = take
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
        self._taken = False
        """Whether a request has been taken that has no response yet."""
        self._full = self._paused = self._ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._front.connections.add(self)
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._front.idle_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        if not self._taken and not self._full:
            self._read()
        if len(self._data) > LARGEST_BYTES + _HEAD_BYTES and not self._paused and self in self._front.connections:
            self._paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._read()

    def end(self) -> None:
        """Close now, or after the response that is due."""
        self._ending = True
        if not self._taken:
            self._transport.close()

    def abort(self) -> None:
        """Close without a response."""
        self._transport.abort()

    def _read(self) -> None:
        """Take requests until one has no response yet."""
        while self._data and not (self._taken or self._full or self._ending):
            try:
                found = read_request(self._data, self._front.paths)
            except NotSimpleError:
                self._hand_over()
                return
            if found is None:
                break
            request, length = found
            whole, self._data = self._data, self._data[length:]
            self._taken = True
            if not self._front.take(request, self._reply):
                self._data = whole
                self._hand_over()
                return
        if self._paused and not self._taken and not self._full:
            self._paused = False
            self._transport.resume_reading()

    def _reply(self, answer: bytes) -> None:
        self._taken = False
        if self._transport.is_closing():
            return
        self._transport.write(answer)
        self._since = self._loop.time()
        if self._ending:
            self._transport.close()
        elif self._data:
            self._loop.call_soon(self._read)  # not at once: this may be called by what `take` has called

    def _hand_over(self) -> None:
        self._leave()
        protocol = self._front.behind()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._paused:
            self._transport.resume_reading()
        protocol.data_received(self._data)

    def _leave(self) -> None:
        self._timer.cancel()
        self._front.connections.discard(self)

    def _look(self) -> None:
        """Close the connection if no request has come for too long."""
        left = self._since + self._front.idle_seconds - self._loop.time()
        if self._taken or left > 0:
            self._timer = self._loop.call_later(self._front.idle_seconds if self._taken else left, self._look)
        else:
            self._transport.close()
