"""Listening over HTTP, plain or with TLS, and words for a client that comes without it where it is wanted.

With TLS the port looks at the first byte of each connection: a TLS handshake starts with 0x16; to anything else it answers in plain
HTTP what is wanted. A client certificate is asked for where there is an authority for it, and `require_certificate` refuses whoever
showed none, so that /health stays open. gRPC owns its sockets: there the handshake itself fails.

Nobody holds a connection for nothing: `make_runner` ends those that rest or do not come to the end of a head, `body_in_time` those
whose body does not come. Both count from the beginning, so a byte now and then does not help. `end_stalled` ends those that do not read
their answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from yarl import URL

from agl_otel.net.auth import NO_CERTIFICATE, Visitors
from agl_otel.service.logs import WithoutErrors

TLS_HANDSHAKE: Final = b"\x16"
FIRST_BYTE_SECONDS: Final = 10.0
BACKLOG: Final = 1024
IDLE_SECONDS: Final = 75.0  # longer than exporters rest between two requests (5 s, metrics 60 s)
PROBE_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.25  # between two looks whether a client is still there
BODY_SECONDS: Final = 120.0  # 64 MiB over 5 Mbit/s
STALLED_SECONDS: Final = 60.0  # that a client takes nothing of its answer, which is held in memory meanwhile
_NO_TARGET: Final = URL("*")  # as of `OPTIONS *`: no route is called so
_logger = logging.getLogger(__name__)
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

    A connection ends that has not sent the whole head of a request within `idle_seconds` of its beginning, or of its last answer.
    """
    server_logger.addFilter(_OF_STRANGERS)
    app.on_response_prepare.append(_keep_from_other_pages)
    return _Runner(app, access_log=None, keepalive_timeout=idle_seconds, **options)


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


@contextlib.contextmanager
def body_in_time(request: web.Request, seconds: float = BODY_SECONDS) -> Generator[None]:
    """Within the block, a read of a body that has not come to its end after `seconds` ends with 408."""
    if request.content.is_eof():
        yield
        return

    def give_up() -> None:
        if not request.content.is_eof():
            request.content.set_exception(web.HTTPRequestTimeout(text=f"the body did not come within {seconds:.0f} s\n"))

    timer = asyncio.get_running_loop().call_later(seconds, give_up)
    try:
        yield
    finally:
        timer.cancel()


@web.middleware
async def bodies_in_time(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """`body_in_time` for every request of an application."""
    with body_in_time(request):
        return await handler(request)


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
    """Answers 400 to JSON so deeply nested that Python's parser gives up, and to a body that is not what its Content-Encoding says."""
    try:
        return await handler(request)
    except RecursionError:
        return web.Response(status=400, text="the body is nested too deeply\n")
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=f"the body cannot be read: {' '.join(str(error).split())}\n")


async def listen(runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None) -> int:
    """Serve a runner that is set up on host:port (0: a free one), until its cleanup; the port. Raises OSError where it cannot listen."""
    if context is None:
        await web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=False).start()
        return int(runner.addresses[0][1])
    assert runner.server is not None, "the runner was not set up"
    listener = TlsListener(runner.server, context, host, port)
    await _TlsSite(runner, listener).start()
    return listener.port


def require_certificate(open_paths: Collection[str] = ()) -> Any:
    """Middleware that refuses clients which showed no certificate, but for these paths."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.path not in open_paths and not peer_has_certificate(request.transport):
            return web.Response(status=401, text=NO_CERTIFICATE + "\n")
        return await handler(request)

    return check


class _TlsSite(web.BaseSite):
    """What makes the runner close the listener at its cleanup."""

    def __init__(self, runner: web.AppRunner, listener: TlsListener) -> None:
        super().__init__(runner)
        self._listener = listener

    @property
    def name(self) -> str:
        """As aiohttp shows it."""
        return f"https://:{self._listener.port}"

    async def start(self) -> None:
        """Tell the runner; the listener listens already."""
        await super().start()

    async def stop(self) -> None:
        """Take no more connections."""
        await self._listener.close()
        await super().stop()


class TlsListener:
    """Listens on (host, port) and hands TLS connections to `factory`'s protocols. Raises OSError where it cannot listen."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext, host: str, port: int) -> None:
        self._factory = factory
        self._context = context
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name="tls-listener")
        self.plain_clients = 0
        """Connections that came without TLS."""

    async def close(self) -> None:
        """Take no more connections; those that are open belong to their protocols."""
        tasks = [self._task, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of file descriptors, mostly
                _logger.warning("cannot accept a connection on port %d: %s", self.port, error)
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        try:
            async with asyncio.timeout(FIRST_BYTE_SECONDS):
                first = await _peek(connection)
            if first == TLS_HANDSHAKE:
                await loop.connect_accepted_socket(self._factory, connection, ssl=self._context)
                return
            if first:
                self.plain_clients += 1
                if self.plain_clients == 1:
                    _logger.warning("a client came without TLS to port %d; it was told to use https://", self.port)
                await loop.sock_sendall(connection, _plain_answer(self.port))
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError: a handshake that failed
            _logger.info("a connection to port %d did not come to be: %s", self.port, error)
        except asyncio.CancelledError:
            connection.close()
            raise
        connection.close()


async def _peek(connection: socket.socket) -> bytes:
    """The first byte, which stays in the socket; empty where the client hung up."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, ready)
    try:
        await readable
    finally:
        with contextlib.suppress(OSError):
            loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


def _plain_answer(port: int) -> bytes:
    text = f"this port speaks TLS: use https://HOST:{port} (AGL_TLS_CA, OTEL_EXPORTER_OTLP_CERTIFICATE)\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + text


def peer_has_certificate(transport: Any) -> bool:
    """Whether the client of an HTTP connection showed a certificate (which the handshake then has checked)."""
    return bool(transport is not None and transport.get_extra_info("peercert"))
