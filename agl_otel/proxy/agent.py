"""The agent's side of a call: its request, and the way back, through aiohttp or ahead of it (net/front.py)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from agl_otel.net.bodies import body_of
from agl_otel.net.front import SAME_ORIGIN, Client, SmallRequest, date, head

Headers = CIMultiDict[str] | CIMultiDictProxy[str]
_CHUNKED: Final = "Transfer-Encoding: chunked"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_WITHOUT_BODY: Final = frozenset({204, 304})


class Agent(Protocol):
    """One request of an agent, which is answered once: by `answer`, or by `begin`, `write` and `end`.

    These raise ConnectionResetError if the agent disconnects meanwhile.
    """

    path: str
    headers: Headers
    own_key: bool
    """Whether the agent sends its own provider key and none of ours: its call gets no key of ours, and a trace of its own."""

    async def body(self) -> bytes:
        """Read the request's body, once. Raises as `Bodies.read` does."""
        ...

    def has_gone(self) -> bool:
        """Whether the agent has disconnected."""
        ...

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer, which is small."""
        ...

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Begin an answer of `length` bytes (None: unknown)."""
        ...

    def buffered(self) -> int:
        """Number of bytes that were written and not sent yet."""
        ...

    async def write(self, data: bytes) -> None:
        """Send a part of the answer; wait while the agent does not read."""
        ...

    async def end(self) -> None:
        """End the answer."""
        ...

    def break_off(self) -> None:
        """Close the connection before the answer ends, so that the agent detects the truncation."""
        ...

    def abort(self) -> None:
        """Close the connection at once, without what was not sent yet."""
        ...


class RequestAgent:
    """The agent of aiohttp's request. `headers`: instead of the request's own."""

    def __init__(self, request: web.Request, headers: Headers | None = None) -> None:
        self.path = request.path
        self.method = request.method
        self.headers = headers if headers is not None else request.headers
        self.own_key = False
        self._sent: web.StreamResponse | None = None
        self._request = request

    async def body(self) -> bytes:
        return await body_of(self._request)

    def has_gone(self) -> bool:
        return self._request.transport is None or self._request.transport.is_closing()

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._sent = web.Response(status=status, body=body, headers=headers)
        await self._sent.prepare(self._request)
        await self._sent.write_eof()

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self._sent = web.StreamResponse(status=status, headers=headers)
        self._sent.content_length = length
        await self._sent.prepare(self._request)

    def buffered(self) -> int:
        return self._request.transport.get_write_buffer_size() if self._request.transport is not None else 0

    async def write(self, data: bytes) -> None:
        await self.answered().write(data)

    async def end(self) -> None:
        await self.answered().write_eof()

    def break_off(self) -> None:
        if self._request.transport is not None:
            self._request.transport.close()

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    @property
    def begun(self) -> bool:
        """Whether the answer has begun."""
        return self._sent is not None

    def answered(self) -> web.StreamResponse:
        """Return the answer, for aiohttp: it has begun."""
        assert self._sent is not None, "the answer has begun"
        return self._sent


class FrontAgent:
    """The agent of a request that was taken ahead of aiohttp."""

    def __init__(self, request: SmallRequest, headers: Headers, client: Client) -> None:
        self.path = request.path
        self.headers = headers
        self.own_key = False
        self.size = len(request.body)
        self._status = 0
        self._body = request.body
        self._client = client
        self._chunked = False

    async def body(self) -> bytes:
        return self._body

    def has_gone(self) -> bool:
        return self._client.is_closing()

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._check()
        self._client.reply(self._head(status, headers, len(body)) + (body if status not in _WITHOUT_BODY else b""))

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self._chunked = length is None and status not in _WITHOUT_BODY
        self._client.write(self._head(status, headers, length))

    def buffered(self) -> int:
        return self._client.buffered()

    async def write(self, data: bytes) -> None:
        if not data or self._status in _WITHOUT_BODY:
            return
        self._client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        await self._client.drained()

    async def end(self) -> None:
        self._check()
        self._client.reply(_LAST_CHUNK if self._chunked else b"")

    def break_off(self) -> None:
        self._client.break_off()

    def abort(self) -> None:
        self._client.abort()

    async def finish(self, refused: web.Response | None) -> str:
        """Answer with `refused`, if there is such an answer; return the status. An answer that was begun is broken off."""
        if refused is not None and not self._client.is_closing():
            if self._status:
                self.break_off()
            else:
                assert isinstance(refused.body, bytes), "it is a text"
                await self.answer(refused.status, refused.headers, refused.body)
        return str(self._status)

    def _check(self) -> None:
        if self._client.is_closing():
            raise ConnectionResetError("the client went away before its answer")

    def _head(self, status: int, headers: Mapping[str, str], length: int | None) -> bytes:
        self._status = status
        lines = [*map(": ".join, headers.items())]
        if status not in _WITHOUT_BODY:
            lines.append(_CHUNKED if length is None else f"Content-Length: {length}")
        if "Content-Type" not in headers:
            lines.append("Content-Type: application/octet-stream")
        if "Date" not in headers:
            lines.append(f"Date: {date()}")
        if "Cross-Origin-Resource-Policy" not in headers:
            lines.append(SAME_ORIGIN)
        return head(_line(status), lines)


@lru_cache(maxsize=100)
def _line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} "
