"""A gRPC port that stays: where a request ends grpcio's server, another one listens in its place.

grpcio 1.85 ends the whole server at a request whose path is no UTF-8, which anybody can send. What is under way is cut then, as if the
service had been started again, and clients try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

import grpc.aio

from agl_otel.errors import InUseError
from agl_otel.net.tls import Tls
from agl_otel.service.logs import WithoutErrors

LOOK_SECONDS: Final = 0.25
"""How long it may stand still before it is noticed."""
_log = logging.getLogger(__name__)
_OF_STRANGERS: Final = WithoutErrors(UnicodeDecodeError)
"""Of each header whose name is no UTF-8, which grpcio takes as Latin-1, and goes on."""
_GRPCIO: Final = logging.getLogger("grpc._cython.cygrpc")


class GrpcPort:
    """Use `start`, then `stop`.

    Args:
        make: gives a new server with its handlers, which does not listen yet.
        setting: the variable that names the port, for errors.
    """

    def __init__(self, make: Callable[[], grpc.aio.Server], setting: str) -> None:
        self._make = make
        self._setting = setting
        self._server: grpc.aio.Server | None = None
        self._staying: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Listen on host:port (0: a free one), with `tls` where it is given; answers the port. Raises InUseError where it is taken."""
        _GRPCIO.addFilter(_OF_STRANGERS)
        if port:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # gRPC's own words do not name the reason
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host.strip("[]"), port))
                except OSError as error:
                    raise InUseError.of_port(host, port, error, self._setting) from None
        try:
            self._server, port = await self._listening(host, port, tls)
        except RuntimeError as error:
            raise InUseError.of_port(host, port, str(error), self._setting) from None
        self._staying = asyncio.create_task(self._stay(self._server, host, port, tls), name="grpc-port")
        return port

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and let those under way end for so long."""
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait({self._staying})
        if self._server is not None:
            await self._server.stop(grace_seconds)

    async def _listening(self, host: str, port: int, tls: Tls | None) -> tuple[grpc.aio.Server, int]:
        server = self._make()
        where = f"{host}:{port}"
        port = server.add_secure_port(where, tls.grpc_credentials()) if tls else server.add_insecure_port(where)
        await server.start()
        return server, port

    async def _stay(self, server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> None:
        while True:
            try:
                while await server.wait_for_termination(LOOK_SECONDS):
                    pass
                return
            except Exception as error:  # noqa: BLE001 - whatever ended it: an Error is no reason not to serve
                _log.error("a request ended the server at %s:%d (%s): another one takes its place", host, port, error)
            await server.stop(0)
            while True:
                with contextlib.suppress(RuntimeError):  # another program was quicker: it may go away
                    server, _ = await self._listening(host, port, tls)
                    break
                await asyncio.sleep(LOOK_SECONDS)
            self._server = server
