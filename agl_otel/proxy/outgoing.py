"""Requests to model servers, which are not trusted either.

None follows a redirect, which would hand prompts and keys to whoever it names, or ask inside this network; no answer is longer than a
bound, unpacked.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import aiohttp

from agl_otel.text import without_secrets

REDIRECT: Final = "redirect"
"""The code of the error that an agent gets in its place."""


class RedirectedError(Exception):
    """The server answered with a redirect; the message names it, and the origin that it points to."""


class OversizedError(aiohttp.ClientError):
    """The server answered with more than the proxy takes; the message has the limit."""

    def __init__(self, most: int) -> None:
        super().__init__(f"its answer is longer than {most >> 20} MiB: the proxy takes no more")


@contextlib.asynccontextmanager
async def ask(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The answer to a request; `options` are aiohttp's. Raises RedirectedError, aiohttp.ClientError, OSError."""
    async with session.request(method, url, allow_redirects=False, **options) as response:
        if 300 <= response.status < 400:
            raise RedirectedError(_told(url, response.status, response.headers.get("location", "")))
        yield response


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, unpacked. Raises OversizedError where it is longer than `most` bytes, aiohttp.ClientError, OSError."""
    if (response.content_length or 0) > most:
        raise OversizedError(most)
    body = bytearray()
    async for piece in response.content.iter_any():
        if len(body) + len(piece) > most:
            raise OversizedError(most)
        body += piece
    return bytes(body)


def _told(url: str, status: int, location: str) -> str:
    server, own = without_secrets(url), _origin(url)
    try:
        named = _origin(urljoin(url, location)) if location else ""
    except ValueError:
        named = ""
    if not named:
        return f"{server} answered with HTTP {status} and no place to look instead: is this its address?"
    where = "another path of its own" if named == own else named
    return (
        f"{server} redirects to {where}, and no redirect is followed, because prompts and keys would go along: "
        "if you trust that address, name it in place of the other"
    )


def _origin(url: str) -> str:
    """scheme://host[:port] of an http address; empty for any other."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.scheme in ("http", "https") and parts.hostname else ""
