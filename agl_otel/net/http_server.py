"""Listening over HTTP, plain or with TLS.

A client certificate is asked for where there is an authority for it, and `require_certificate` refuses requests without one, so that
/health stays open. gRPC owns its sockets: there the handshake itself fails.

Nobody holds a connection for nothing: `make_runner` ends those that rest or do not come to the end of a head, bodies.py those whose body
does not come. Both count from the beginning, so a byte now and then does not help. `end_stalled` ends those that do not read their
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from yarl import URL

from agl_otel.net.auth import NO_CERTIFICATE, Visitors
from agl_otel.service.logs import WithoutErrors

BACKLOG: Final = 1024
IDLE_SECONDS: Final = 75.0  # longer than exporters rest between two requests (5 s, metrics 60 s)
PROBE_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.25  # between two looks whether a client is still there
STALLED_SECONDS: Final = 60.0  # that a client takes nothing of its answer, which is held in memory meanwhile
_NO_TARGET: Final = URL("*")  # as of `OPTIONS *`: no route is called so
T = TypeVar("T")


async def listens(address: str, *, seconds: float = 1.0) -> bool:
    """Whether a TCP connection to [scheme://]host:port comes about within `seconds`."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def is_well(url: str, session: aiohttp.ClientSession | None = None, *, seconds: float = PROBE_SECONDS) -> bool:
    """Whether a GET of `url` is answered with 200 within `seconds`; by `session`, where one is given."""
    async with contextlib.AsyncExitStack() as closers:
        asking = session or await closers.enter_async_context(aiohttp.ClientSession())
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asking.get(url, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                return answer.status == 200
    return False


_OF_STRANGERS: Final = WithoutErrors(HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""Of each request that is no HTTP or whose body is not what its Content-Encoding says (its client was answered 400 with the reason), and of
each whose client hung up."""


def make_runner(app: web.Application, *, idle_seconds: float = IDLE_SECONDS, **options: Any) -> web.AppRunner:
    """A runner for `listen`; `options` are AppRunner's.

    A connection ends that has not sent the whole head of a request within `idle_seconds` of its beginning, or of its last answer. Bodies
    come as they were sent: bodies.py unpacks them, with bounds.
    """
    server_logger.addFilter(_OF_STRANGERS)
    app.on_response_prepare.append(_keep_from_other_pages)
    return _Runner(app, access_log=None, keepalive_timeout=idle_seconds, auto_decompress=False, **options)


async def _keep_from_other_pages(_: web.Request, answer: web.StreamResponse) -> None:
    """No page of another origin gets it into its process, as an image or a script, say."""
    answer.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")


class _Runner(web.AppRunner):
    """One that answers a request line without a target (`CONNECT `), too: for aiohttp it has no URL, and its task would end there."""

    async def setup(self) -> None:
        """Make the server."""
        await super().setup()
        server = self.server
        assert server is not None, "it was just made"
        make = server.request_factory

        def with_target(message: Any, *more: Any) -> web.BaseRequest:
            return make(message if message.url is not None else message._replace(url=_NO_TARGET), *more)

        server.request_factory = with_target


async def while_connected(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. It is cancelled where the client goes away before. Raises ConnectionResetError then."""
    task = asyncio.ensure_future(work)
    try:
        while request.transport is not None:
            if task in (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                return task.result()
        raise ConnectionResetError("the client went away before its answer")
    finally:
        task.cancel()


def end_stalled(app: web.Application, seconds: float = STALLED_SECONDS) -> None:
    """Have the kernel end the connections of `app` whose clients take nothing of an answer for `seconds` (Linux; elsewhere nobody does)."""
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return

    async def limit(request: web.Request, _: web.StreamResponse) -> None:
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))

    app.on_response_prepare.append(limit)


def own_visitors(visitors: Visitors, *, page: str = "") -> Any:
    """Middleware that refuses requests as `visitors` has it; other sites may link to a route called `page`."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        link = bool(page) and request.match_info.route.name == page
        if (why := visitors.refusal(request.method, request.headers, link=link)) is not None:
            return web.Response(status=403, text=why + "\n")
        return await handler(request)

    return check


@web.middleware
async def readable(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Answers 400 to JSON so deeply nested that Python's parser gives up, and to a body that breaks HTTP."""
    try:
        return await handler(request)
    except RecursionError:
        return web.Response(status=400, text="the body is nested too deeply\n")
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"the body cannot be read: {' '.join(str(error).split())}\n")


async def listen(runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None) -> int:
    """Serve a runner that is set up on host:port (0: a free one), until its cleanup; the port. Raises OSError where it cannot listen."""
    await web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=False, ssl_context=context).start()
    return int(runner.addresses[0][1])


def require_certificate(open_paths: Collection[str] = ()) -> Any:
    """Middleware that refuses clients which showed no certificate, but for these paths."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.path not in open_paths and not peer_has_certificate(request.transport):
            return web.Response(status=401, text=NO_CERTIFICATE + "\n")
        return await handler(request)

    return check


def peer_has_certificate(transport: Any) -> bool:
    """Whether the client of an HTTP connection showed a certificate (which the handshake then has checked)."""
    return bool(transport is not None and transport.get_extra_info("peercert"))
