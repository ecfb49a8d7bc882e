"""Requests to model servers, which are untrusted.

Redirects are not followed: they could send prompts and keys to another server, or reach into this network. Answers are limited in size and
must not be compressed: requests ask for identity, and their session needs auto_decompress=False.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncGenerator
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import aiohttp
from multidict import CIMultiDict

from agl_otel.net.posting import Answer, post, release
from agl_otel.text import printable, without_secrets

REDIRECT: Final = "redirect"
"""Error code for an agent whose model server answered with a redirect."""
OVERSIZED: Final = "upstream_oversized"
PACKED: Final = "upstream_packed"
_MOST_SHOWN: Final = 100  # characters of a header in a message


class RedirectedError(Exception):
    """A server answered with a redirect; the message names the server and the origin of the target."""


class RefusedAnswerError(aiohttp.ClientError):
    """A server's answer is not accepted by the proxy; the message names the reason and the limit."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.code = code
        """The code of the agent's error, also recorded as why the call is incomplete."""


def oversized(what: str) -> RefusedAnswerError:
    """The error for an answer that is too large."""
    return RefusedAnswerError(f"sends too large an answer: {what}: the proxy takes no more", OVERSIZED)


@contextlib.asynccontextmanager
async def ask(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Yield the answer to a request; `options` are aiohttp's. Raises RedirectedError, RefusedAnswerError, aiohttp.ClientError, OSError."""
    async with session.request(method, url, allow_redirects=False, **options) as response:
        _check(response, url)
        yield response


class Asked:
    """The answer to a POST of bytes, for use as a context; a class, because this runs for each call.

    Entering it raises RedirectedError, RefusedAnswerError, aiohttp.ClientError, OSError.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, data: bytes | io.BytesIO, headers: CIMultiDict[str]) -> None:
        self._session = session
        self._url = url
        self._data = data
        self._headers = headers
        self._connection: aiohttp.connector.Connection | None = None
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> Answer:
        sent = await post(self._session, self._url, self._data, self._headers) if isinstance(self._data, bytes) else None
        if sent is not None:
            answer, self._connection = sent
        else:
            self._response = await self._session.post(self._url, data=self._data, headers=self._headers, allow_redirects=False)
            answer = Answer(self._response.status, self._response.headers, self._response.content)
        try:
            _check(answer, self._url)
        except Exception:
            self._release()
            raise
        return answer

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._connection is not None:
            release(self._connection)
        if self._response is not None:
            self._response.release()


def _check(response: Answer | aiohttp.ClientResponse, url: str) -> None:
    if 300 <= response.status < 400:
        raise RedirectedError(_redirect_message(url, response.status, response.headers.get("location", "")))
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        shown = printable(encoding[:_MOST_SHOWN])
        message = f"answers with Content-Encoding: {shown}, although none was requested (Accept-Encoding: identity)"
        raise RefusedAnswerError(message, PACKED)


async def whole(response: Answer | aiohttp.ClientResponse, most: int) -> bytes:
    """Read the body. Raises RefusedAnswerError if it is longer than `most` bytes, aiohttp.ClientError, OSError."""
    if isinstance(response, Answer) and response.body is not None and len(response.body) <= most:
        return response.body
    pieces: list[bytes] = []
    size, announced, content = 0, response.content_length or 0, response.content
    while max(size, announced) <= most and content is not None and not content.at_eof():
        pieces.append(await content.readany())
        size += len(pieces[-1])
    if max(size, announced) > most:
        raise oversized(f"its answer is longer than {most >> 20} MiB")
    return b"".join(pieces)


def _redirect_message(url: str, status: int, location: str) -> str:
    server, own = without_secrets(url), _origin(url)
    try:
        named = _origin(urljoin(url, location)) if location else ""
    except ValueError:
        named = ""
    if not named:
        return f"{server} answered with HTTP {status} without a location: is this its address?"
    where = "another path of its own" if named == own else named
    return (
        f"{server} redirects to {where}, and redirects are not followed, because prompts and keys would be sent there: "
        "if you trust that address, configure it instead"
    )


def _origin(url: str) -> str:
    """scheme://host[:port] of an http address; empty for any other."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.scheme in ("http", "https") and parts.hostname else ""
