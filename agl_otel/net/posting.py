"""Send small POST requests over aiohttp's connections, without its session and parser, which need some 140 µs of CPU more for each.

Only what is beyond doubt is sent here: a body in one piece, headers that mean nothing to aiohttp itself, an address without a password.
`post` returns None for any other request, and the caller has its session send it. So it does with another release of aiohttp, whose
internals this was not tried with. A response that is small and whole is read here, too; of any other aiohttp reads every byte.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from agl_otel.net.front import NotSimpleError, read_head

LARGEST_BYTES: Final = 1 << 20
"""The largest body sent here: it is written at once, whether the server reads it or not."""
_TRIED: Final = aiohttp.__version__.startswith("3.14.")
_OWN: Final = ("Host", "Accept", "User-Agent")
"""Headers that aiohttp sets unless they are given."""
_AIOHTTPS: Final = ("host", "content-length", "transfer-encoding", "content-encoding", "connection", "expect", "upgrade")
"""Headers of requests that are not sent here."""
_STATUS: Final = re.compile(r"HTTP/1\.1 ([2-5][0-9][0-9])(?: [\t\x20-\x7e]*)?")
_LENGTH: Final = re.compile(r"[0-9]{1,6}")
_WHOLE_BYTES: Final = 256 << 10
"""Larger responses are aiohttp's."""
_PART_SECONDS: Final = 0.2
"""After this time a response of which only a part has come is aiohttp's, too: its reader sees that it began."""
_CONNECTIONS: Final = 100
"""How many connections are given up for one request because something came on them that nobody had asked for."""
_OF_CONNECTIONS: Final = ("transfer-encoding", "connection", "proxy-connection", "keep-alive", "upgrade")
"""Headers of responses that are not read here; HTTP/1.1 keeps connections without them."""
_WITHOUT_BODY: Final = frozenset({204, 205, 304})


@dataclass(slots=True)
class Answer:
    """A response: its head, and its body or the stream of it."""

    status: int
    headers: MultiMapping[str]
    content: StreamReader | None
    body: bytes | None = None
    began: int = 0
    """When its first byte came, in Unix nanoseconds; 0 if unknown."""

    @property
    def content_type(self) -> str:
        """The media type, in lower case and without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        """The announced length of the body."""
        given = self.headers.get("content-length", "")
        return int(given) if given.isdecimal() else None


class _Target(NamedTuple):
    """What requests to one address have in common."""

    request: aiohttp.ClientRequest
    """Names the server to a connector."""
    line: str
    own: CIMultiDict[str]


async def post(
    session: aiohttp.ClientSession, url: str, data: bytes, headers: CIMultiDict[str]
) -> tuple[Answer, aiohttp.connector.Connection] | None:
    """Send a request and wait for the head of its response; `release` the connection at its end.

    Returns None, having done nothing, for a request that is not to be sent here. Raises aiohttp.ClientError, OSError as the session does.
    """
    target, connector = _target(url), session.connector
    if target is None or connector is None or len(data) > LARGEST_BYTES or any(name in headers for name in _AIOHTTPS):
        return None
    sent = {name: value for name, value in target.own.items() if name not in headers}
    lines = [target.line, *map(": ".join, sent.items()), *map(": ".join, headers.items()), f"Content-Length: {len(data)}", "", ""]
    head = "\r\n".join(lines)
    if not len(lines) - 1 == head.count("\n") == head.count("\r") or "\0" in head:
        return None  # a line break in a header
    try:
        connection = await _connect(connector, target, session.timeout)
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
    try:
        return await _exchange(connection, target, head.encode(errors="surrogateescape") + data, session.timeout.sock_read), connection
    except BaseException:
        connection.close()
        raise


async def _connect(connector: aiohttp.BaseConnector, target: _Target, timeout: aiohttp.ClientTimeout) -> aiohttp.connector.Connection:
    """Return a connection on which nothing has come since its last response. Raises aiohttp.ClientError if there is none."""
    for _ in range(_CONNECTIONS):
        connection = await connector.connect(target.request, [], timeout)
        if connection.protocol is None or not connection.protocol.should_close:
            return connection
        connection.close()
    raise aiohttp.ClientPayloadError("the server sends what nobody has asked for")


async def _exchange(connection: aiohttp.connector.Connection, target: _Target, request: bytes, read_seconds: float | None) -> Answer:
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None:
        raise aiohttp.ServerDisconnectedError
    reading = _Reading(protocol, transport, read_seconds)
    transport.write(request)
    if (answer := await reading.answer) is not None:
        answer.began = reading.began
        return answer
    try:
        while True:
            message, content = await protocol.read()
            if not 100 <= message.code < 200 or message.code == 101:
                return Answer(message.code, message.headers, content, began=reading.began)
    except HttpProcessingError as error:
        about = target.request.request_info
        raise aiohttp.ClientResponseError(about, (), status=error.code, message=error.message, headers=error.headers) from error


def read_response(data: bytes) -> Answer | None:
    """Read a small response with its whole body; None if more must come. Raises NotSimpleError for any other bytes."""
    if (found := read_head(data, b"HTTP/1.1 ")) is None:
        return None
    first, lines, begin = found
    if (status := _STATUS.fullmatch(first)) is None:
        raise NotSimpleError
    headers = CIMultiDict((name, value.strip(" \t")) for name, _, value in (line.partition(":") for line in lines))
    lengths, code = headers.getall("content-length", ()), int(status[1])
    if len(lengths) != 1 or _LENGTH.fullmatch(lengths[0]) is None or code in _WITHOUT_BODY:
        raise NotSimpleError
    if any(name in headers for name in _OF_CONNECTIONS):
        raise NotSimpleError
    length = begin + int(lengths[0])
    if length > _WHOLE_BYTES or len(data) > length or "event-stream" in headers.get("content-type", "").lower():
        raise NotSimpleError
    return Answer(code, headers, None, data[begin:]) if len(data) == length else None


class _Reading(asyncio.Protocol):
    """Reads a small and whole response ahead of aiohttp's protocol of the connection (`behind`), which reads any other.

    `answer` is None if the response is aiohttp's. It raises aiohttp.SocketTimeoutError after `read_seconds` without the first byte.
    """

    def __init__(self, behind: ResponseHandler, transport: asyncio.Transport, read_seconds: float | None) -> None:
        self._behind = behind
        self._transport = transport
        self._seconds = read_seconds
        self._data = b""
        self.began = 0
        """When the first byte came, in Unix nanoseconds."""
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._timer = self._loop.call_later(read_seconds, self._time_out) if read_seconds is not None else None
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        first, self._data = not self._data, self._data + data if self._data else data
        self.began = self.began or time.time_ns()
        try:
            answer = read_response(self._data)
        except NotSimpleError:
            self._hand_over()
            return
        if answer is not None:
            self._end(answer)
        elif first:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(_PART_SECONDS, self._hand_over)

    def eof_received(self) -> bool | None:
        self._hand_over()
        return self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hand_over()
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    def _hand_over(self) -> None:
        data = self._data
        self._end(None)
        self._behind.set_response_params(read_until_eof=True, auto_decompress=False, read_timeout=self._seconds)
        self._behind.start_timeout()
        if data:
            self._behind.data_received(data)

    def _end(self, answer: Answer | None) -> None:
        self._transport.set_protocol(self._behind)
        if self._timer is not None:
            self._timer.cancel()
        if not self.answer.done():
            self.answer.set_result(answer)

    def _time_out(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))


def release(connection: aiohttp.connector.Connection) -> None:
    """Give the connection back, or close it if its request or response has not been transferred in full."""
    transport = connection.transport
    if transport is not None and transport.get_write_buffer_size():
        connection.close()
    connection.release()


@lru_cache(maxsize=4096)
def _target(address: str) -> _Target | None:
    """Return what requests to a URL have in common; None if requests to it are not sent here. Raises as the session does."""
    url = URL(address)
    if not _TRIED or url.scheme not in ("http", "https") or not url.raw_host or url.user is not None or url.password is not None:
        return None
    request = aiohttp.ClientRequest("POST", url)
    own = CIMultiDict((name, request.headers[name]) for name in _OWN if name in request.headers)
    own.setdefault("User-Agent", aiohttp.http.SERVER_SOFTWARE)
    return _Target(request, f"POST {request.url.raw_path_qs} HTTP/1.1", own)
