"""HTTP/1.1 to model servers: connections kept alive, one write a request, bodies handed on piece by piece as they come.

A general client spends more on a call than all that this proxy does with it, on what a proxy has no use for (cookies, tracing, retries,
typed payloads). This one knows requests with a body in memory, answers with a length, in chunks, or until the end of the connection,
TLS, and redirects that keep the method. How bytes become an answer is http_answer.py.

Everything that goes wrong is an OSError: a TimeoutError where the server was silent, an `http_answer.BrokenOffError` else.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

from agl_otel.proxy.http_answer import Answer, BrokenOffError, Connection

PIECE_BYTES: Final = 256 << 10  # a large body goes in such pieces, between which other calls get their turn
MAX_REDIRECTS: Final = 5
HAPPY_EYEBALLS_SECONDS: Final = 0.25  # RFC 8305: after that the next address is tried beside the first
MAX_IDLE: Final = 256  # connections to one server that wait for a call
_REDIRECTS: Final = frozenset({307, 308})
"""Those that keep the method and the body; of a POST nothing is left after the others."""
_KEYS: Final = frozenset({"authorization", "x-api-key"})
Headers = Iterable[tuple[str, str]]


class ConnectTimeoutError(TimeoutError):
    """The server could not be reached in time; it was asked nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """What of a URL a request needs."""

    scheme: str
    host: str
    port: int
    path: str
    """With the query."""
    head: str
    """The header lines that the URL alone decides."""

    @property
    def server(self) -> tuple[str, str, int]:
        """Calls to the same server share connections."""
        return self.scheme, self.host, self.port


@lru_cache(maxsize=4096)
def target_of(url: str) -> Target:
    """The parts of an http or https URL. Raises BrokenOffError for any other text."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        host = parts.hostname or ""
    except (ValueError, KeyError):
        raise BrokenOffError(f"{url[:200]} is no http or https address") from None
    if not host or any(not "!" <= character <= "~" for character in url):
        raise BrokenOffError(f"{url[:200]!r} is no http or https address")
    user, at, netloc = parts.netloc.rpartition("@")
    head = f"host: {netloc}\r\n"
    if at:
        head += f"authorization: Basic {base64.b64encode(unquote(user).encode()).decode()}\r\n"
    return Target(parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), head)


class HttpClient:
    """Asks servers. Use it in one event loop; `close` it. Times are in seconds."""

    def __init__(self, *, connect_seconds: float, silence_seconds: float, keep_alive_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._idle: dict[tuple[str, str, int], list[tuple[Connection, float]]] = {}
        self._open: set[Connection] = set()
        self._context: ssl.SSLContext | None = None
        self._closed = False

    async def close(self) -> None:
        """Close all connections, those of calls under way too."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._open):
            connection.abort()

    @asynccontextmanager
    async def request(self, method: str, url: str, *, headers: Headers, body: bytes = b"") -> AsyncGenerator[Answer]:
        """Ask; the answer's head has come. Leaving the block before its body was read closes the connection.

        Raises OSError (see the module), and ValueError for a header that would be two.
        """
        for _ in range(MAX_REDIRECTS):
            target = target_of(url)
            connection = await self._connection(target)
            try:
                answer = await self._ask(connection, method, target, headers, body)
                where = answer.headers.get("location") if answer.status in _REDIRECTS else None
                if where is None:
                    yield answer
                    return
                await answer.read()
            finally:
                self._put_back(target, connection)
            url = urljoin(url, where)
            if target_of(url).server != target.server:
                headers = [(name, value) for name, value in headers if name.lower() not in _KEYS]
        raise BrokenOffError(f"{url[:200]} is the end of {MAX_REDIRECTS} redirects and still none of an answer")

    async def _ask(self, connection: Connection, method: str, target: Target, headers: Headers, body: bytes) -> Answer:
        each = [f"{name}: {value}\r\n" for name, value in headers]
        lines = "".join(each)
        if lines.count("\n") != len(each) or lines.count("\r") != len(each):
            raise ValueError("a header has a line break: keys and other values of headers are one line each")
        length = f"content-length: {len(body)}\r\n" if body or method != "GET" else ""
        head = f"{method} {target.path} HTTP/1.1\r\n{target.head}{lines}{length}\r\n".encode("utf-8", "surrogateescape")
        answer = connection.begin(self._silence_seconds)
        if len(body) <= PIECE_BYTES:
            connection.write(head + body if body else head)
        else:
            connection.write(head)
            for at in range(0, len(body), PIECE_BYTES):
                connection.write(body[at : at + PIECE_BYTES])
                await connection.drained(self._silence_seconds)
        await answer.head()
        return answer

    async def _connection(self, target: Target) -> Connection:
        idle = self._idle.get(target.server)
        while idle:
            connection, until = idle.pop()
            if connection.is_open and until > time.monotonic():
                return connection
            connection.abort()
        return await self._connect(target)

    async def _connect(self, target: Target) -> Connection:
        if self._closed:
            raise BrokenOffError("the proxy ends")
        context = None
        if target.scheme == "https":
            context = self._context = self._context or ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._open), target.host, target.port, ssl=context, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS
                )
        except TimeoutError:
            raise ConnectTimeoutError(f"no connection to {target.host}:{target.port} within {self._connect_seconds:g} s") from None
        return connection

    def _put_back(self, target: Target, connection: Connection) -> None:
        idle = self._idle.setdefault(target.server, [])
        if connection.is_reusable and len(idle) < MAX_IDLE and not self._closed:
            idle.append((connection, time.monotonic() + self._keep_alive_seconds))
        else:
            connection.abort()
