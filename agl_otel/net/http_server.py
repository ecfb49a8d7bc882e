"""Serve HTTP, plain or with TLS.

With a client authority the handshake requests a certificate, and `require_certificate` refuses requests without one, so that /health stays
open. gRPC owns its sockets: there the handshake itself fails.

Idle and slow connections are closed: by `make_runner` if they are idle or do not complete a request's head, by bodies.py if the body is
late. Both timeouts run from the start, so sending a byte now and then does not extend them. `end_stalled` closes connections whose client
does not read its answer. A stop answers the requests that have arrived, and closes the connections of those of which a part is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from yarl import URL

from agl_otel.net.auth import NO_CERTIFICATE, BrowserAccess
from agl_otel.net.front import Front, RefuseHttp2, Take
from agl_otel.service.logs import ErrorFilter

BACKLOG: Final = 1024
IDLE_SECONDS: Final = 75.0  # longer than exporters pause between requests (5 s, metrics 60 s)
PROBE_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 10.0
"""For which a stop waits for answers under way, those of the front and those of aiohttp."""
LOOK_SECONDS: Final = 0.25  # between two checks whether a client is still connected
STALLED_SECONDS: Final = 60.0  # without progress of a client that reads its answer, which stays in memory meanwhile
_NO_TARGET: Final = URL("*")  # as in `OPTIONS *`; matches no route
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def listens(address: str, *, seconds: float = 1.0) -> bool:
    """Whether [scheme://]host:port accepts a TCP connection within `seconds`."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def is_healthy(url: str, session: aiohttp.ClientSession | None = None, *, seconds: float = PROBE_SECONDS) -> bool:
    """Whether a GET of `url`, through `session` if given, is answered with 200 within `seconds`."""
    async with contextlib.AsyncExitStack() as closers:
        asking = session or await closers.enter_async_context(aiohttp.ClientSession())
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asking.get(url, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                return answer.status == 200
    return False


_CLIENT_ERRORS: Final = ErrorFilter(HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""Suppress tracebacks for requests that are not HTTP or whose body does not match its Content-Encoding (the client got a 400 with the
reason), and for disconnected clients."""


FRONT: Final = web.AppKey("front", tuple[Callable[[str], bool], Take, RefuseHttp2])
"""Whether small POST requests for a path are taken ahead of the application (front.py), what takes them, and what refuses HTTP/2."""


def make_runner(app: web.Application, *, idle_seconds: float = IDLE_SECONDS, **options: Any) -> web.AppRunner:
    """Return a runner for `listen`; `options` are AppRunner's.

    A connection is closed if it has not sent the complete head of a request within `idle_seconds` of its start or its last answer. Bodies
    are not decompressed here: bodies.py does it, with limits.
    """
    server_logger.addFilter(_CLIENT_ERRORS)
    app.on_response_prepare.append(_forbid_other_origins)
    return _Runner(app, idle_seconds, access_log=None, keepalive_timeout=idle_seconds, auto_decompress=False, **options)


async def _forbid_other_origins(_: web.Request, answer: web.StreamResponse) -> None:
    """Forbid pages of other origins to load the answer, for example as an image or a script."""
    answer.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")


class _Runner(web.AppRunner):
    """An AppRunner with a front, if its application has one (FRONT).

    It also answers a request line without a target (`CONNECT `), whose missing URL would end aiohttp's task.
    """

    def __init__(self, app: web.Application, idle_seconds: float, **options: Any) -> None:
        options = {"shutdown_timeout": ANSWER_SECONDS} | options
        super().__init__(app, **options)
        self._idle_seconds = idle_seconds
        self._patience: float = options["shutdown_timeout"]
        self._front: Front | None = None
        self._requests: weakref.WeakValueDictionary[int, web.BaseRequest] = weakref.WeakValueDictionary()

    async def setup(self) -> None:
        """Set up the server."""
        await super().setup()
        server = super().server
        assert server is not None, "it was just made"
        make = server.request_factory

        def made(message: Any, *more: Any) -> web.BaseRequest:
            request = make(message if message.url is not None else message._replace(url=_NO_TARGET), *more)
            self._requests[id(request)] = request  # requests cannot be hashed
            return request

        server.request_factory = made
        if FRONT in self.app:
            self._front = Front(*self.app[FRONT], server, idle_seconds=self._idle_seconds)

    @property
    def server(self) -> Any:
        """The protocol factory, which sites listen with."""
        return self._front or super().server

    async def shutdown(self) -> None:
        """Let the requests that have arrived be answered, and end the others: aiohttp drops what arrives of them from now on."""
        for request in [*self._requests.values()]:
            if request.transport is not None and not request.content.is_eof():
                request.transport.abort()
        server = super().server
        assert server is not None, "it is set up"
        waits: list[Awaitable[None]] = [server.shutdown(self._patience / 2)]  # it waits twice: before and after it cancels request bodies
        if self._front is not None:
            waits.append(self._front.close(self._patience))
        await asyncio.gather(*waits)
        await super().shutdown()


async def while_connected(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the client disconnects first, cancel it and raise ConnectionResetError."""
    task = asyncio.ensure_future(work)
    try:
        while request.transport is not None:
            if task in (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                return task.result()
        raise ConnectionResetError("the client went away before its answer")
    finally:
        task.cancel()


def end_stalled(app: web.Application, seconds: float = STALLED_SECONDS) -> None:
    """Let the kernel close connections of `app` whose clients read nothing of an answer for `seconds` (Linux only)."""
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return

    async def limit(request: web.Request, _: web.StreamResponse) -> None:
        connection = request.transport.get_extra_info("socket") if request.transport is not None else None
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))

    app.on_response_prepare.append(limit)


def browser_access(visitors: BrowserAccess, *, page: str = "") -> Any:
    """Middleware that refuses requests by the rules of `visitors`; other sites may link to the route named `page`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        link = bool(page) and request.match_info.route.name == page
        if (why := visitors.refusal(request.method, request.headers, link=link)) is not None:
            return web.Response(status=403, text=why + "\n")
        return await handler(request)

    return check


@web.middleware
async def readable(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: answer 400 to JSON too deeply nested for Python's parser, and to a body that violates HTTP."""
    try:
        return await handler(request)
    except RecursionError:
        return web.Response(status=400, text="the body is nested too deeply\n")
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"the body cannot be read: {' '.join(str(error).split())}\n")


async def listen(runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None) -> int:
    """Serve a set-up runner on host:port (0: a free port) until its cleanup; return the port. Raises OSError if it cannot listen."""
    await web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=False, ssl_context=context).start()
    return int(runner.addresses[0][1])


def require_certificate(open_paths: Collection[str] = ()) -> Any:
    """Middleware that refuses clients without a certificate, except on `open_paths`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not peer_has_certificate(request.transport):
            return web.Response(status=401, text=NO_CERTIFICATE + "\n")
        return await handler(request)

    return check


def peer_has_certificate(transport: Any) -> bool:
    """Whether the client of an HTTP connection has a certificate, which the handshake verified."""
    return bool(transport is not None and transport.get_extra_info("peercert"))
