"""A running queue: an engine, its service on a gRPC port, and the watchdog that sweeps it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Final, cast

import grpc
import grpc.aio

from agl_otel.errors import AglError, SettingsError
from agl_otel.net import auth
from agl_otel.net.grpc_server import GrpcPort, Registrar, TokenInterceptor
from agl_otel.net.tls import Tls
from agl_otel.queue.bounds import check_items
from agl_otel.queue.engine import Engine
from agl_otel.queue.measured import QueueMeters
from agl_otel.queue.proto import queue_pb2_grpc
from agl_otel.queue.service import QueueService
from agl_otel.queue.sqlite import SqliteEngine, sqlite_path

MAX_MESSAGE_BYTES: Final = 64 << 20
SWEEP_SECONDS: Final = 1.0  # an overdue attempt is detected within this
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # else a second service could share the port and take half of the calls
    ("grpc.keepalive_time_ms", 20_000),  # a claimer whose machine vanished is detected after this plus the timeout
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
_OF_SERVICES: Final = frozenset({"/agl.queue.v1.Queue/Announce", "/agl.queue.v1.Queue/Witness"})
"""Methods that register addresses, to which other processes send the stack's token."""
_log = logging.getLogger(__name__)


def open_engine(url: str) -> Engine:
    """Open the engine for sqlite:///PATH or postgresql://…; call it inside the event loop.

    Raises SettingsError, InUseError, ConflictError, and UnavailableError if the server does not answer.
    """
    if (file := sqlite_path(url)) is not None:
        return SqliteEngine(file)
    scheme, _, path = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        return _open_postgres(url)
    raise SettingsError(  # the rest of the URL may hold a password
        f"AGL_QUEUE_URL {scheme + '://…' if path else '(no URL)'} is not understood: use sqlite:///PATH (four slashes for an absolute "
        "one) or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    )


def _open_postgres(url: str) -> Engine:
    try:
        from agl_otel.queue.postgres import PostgresEngine
    except ImportError as error:
        raise SettingsError(f"AGL_QUEUE_URL is postgresql://… but {error.name} is missing: pip install 'agl-otel[postgres]'") from None
    return PostgresEngine(url)


class QueueServer:
    """A queue server. Call `start`, then `stop`."""

    def __init__(
        self, engine: Engine, *, token: str = "", clock: Callable[[], float] | None = None, sweep_seconds: float = SWEEP_SECONDS
    ) -> None:
        self._engine = engine
        self._measured = QueueMeters()
        self.meters = self._measured.meters
        engine.subscribe(self._measured.committed)
        engine.instrument(self._measured.transacted)
        self.service = QueueService(engine, version=version("agl-otel"), clock=clock or engine.now, meters=self.meters, token=token)
        self._token = token
        self._sweep_seconds = sweep_seconds
        self._listener = GrpcPort(self._make, "AGL_QUEUE_PORT or --queue-port")
        self._watchdog: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int, tls: Tls | None = None) -> str:
        """Listen on host:port (0: a free port), with `tls` if given; return the address. Raises InUseError if the port is taken.

        The first sweep comes before the first answer: commands on a data directory without a stack run the queue for less than a second.
        """
        if self._sweep_seconds > 0:
            await self._sweep()
        self.port = await self._listener.start(host, port, tls)
        self.service.address = f"{'https://' if tls else ''}{host}:{self.port}"
        if self._sweep_seconds > 0:
            self._watchdog = asyncio.create_task(self._watch())
        return self.service.address

    def _make(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=TokenInterceptor.at(auth.QUEUE, self._token, _OF_SERVICES), options=OPTIONS)
        queue_pb2_grpc.add_QueueServicer_to_server(
            cast("queue_pb2_grpc.QueueServicer", self.service),
            cast("grpc.aio.Server", Registrar(server, self._measured.called, check_items)),
        )
        return server

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Refuse new calls, let running ones end, finish waiting writes, close the engine."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.service.stop_waiting()
        await self._listener.stop(grace_seconds)
        await self.service.drain()
        await self._engine.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_seconds)
            await self._sweep()

    async def _sweep(self) -> None:
        try:
            await self.service.sweep()
        except AglError as error:  # such as a full disk: the next round tries again
            _log.warning("the watchdog could not sweep: %s", error)
