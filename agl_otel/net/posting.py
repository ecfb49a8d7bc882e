"""Send small POST requests over aiohttp's connections, without its session, which needs some 100 µs of CPU more for each.

Only what is beyond doubt is sent here: a body in one piece, headers that mean nothing to aiohttp itself, an address without a password.
`post` returns None for any other request, and the caller has its session send it. So it does with another release of aiohttp, whose
internals this was not tried with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import aiohttp
from aiohttp.http import HttpProcessingError
from aiohttp.streams import StreamReader
from multidict import CIMultiDict
from yarl import URL

LARGEST_BYTES: Final = 1 << 20
"""The largest body sent here: it is written at once, whether the server reads it or not."""
_TRIED: Final = aiohttp.__version__.startswith("3.14.")
_OWN: Final = ("Host", "Accept", "User-Agent")
"""Headers that aiohttp sets unless they are given."""
_AIOHTTPS: Final = ("host", "content-length", "transfer-encoding", "content-encoding", "connection", "expect", "upgrade")
"""Headers of requests that are not sent here."""


@dataclass(slots=True)
class Answer:
    """The head of a response, and the stream of its body."""

    status: int
    headers: Mapping[str, str]
    content: StreamReader

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
        connection = await connector.connect(target.request, [], session.timeout)
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
    try:
        return await _exchange(connection, target, head.encode(errors="surrogateescape") + data, session.timeout.sock_read), connection
    except BaseException:
        connection.close()
        raise


async def _exchange(connection: aiohttp.connector.Connection, target: _Target, request: bytes, read_seconds: float | None) -> Answer:
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None:
        raise aiohttp.ServerDisconnectedError
    protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_timeout=read_seconds)
    transport.write(request)
    protocol.start_timeout()
    try:
        while True:
            message, content = await protocol.read()
            if not 100 <= message.code < 200 or message.code == 101:
                return Answer(message.code, message.headers, content)
    except HttpProcessingError as error:
        about = target.request.request_info
        raise aiohttp.ClientResponseError(about, (), status=error.code, message=error.message, headers=error.headers) from error


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
