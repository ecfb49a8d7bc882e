"""TLS for the two OTLP ports, and words for a client that comes without it.

The HTTP port looks at the first byte of each connection: a TLS handshake starts with 0x16; to anything else it answers in plain
HTTP what is wanted. A client certificate is asked for where there is an authority for it, and the application refuses whoever
showed none, so that /health stays open. gRPC owns its sockets: there the handshake itself fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from agl_otel.errors import SettingsError
from agl_otel.settings import Settings

TLS_HANDSHAKE: Final = b"\x16"
FIRST_BYTE_SECONDS: Final = 10.0
BACKLOG: Final = 128
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tls:
    """What both ports need."""

    certificate: bytes
    key: bytes
    client_authority: bytes | None
    context: ssl.SSLContext

    @classmethod
    def load(cls, settings: Settings) -> Tls | None:
        """None where no certificate is set. Raises SettingsError where a file is missing or wrong."""
        if not settings.tls_cert and not settings.tls_key:
            if settings.tls_client_ca:
                raise SettingsError("AGL_TLS_CLIENT_CA needs AGL_TLS_CERT and AGL_TLS_KEY")
            return None
        if not settings.tls_cert or not settings.tls_key:
            raise SettingsError("TLS needs both AGL_TLS_CERT and AGL_TLS_KEY")
        certificate, key = _read(settings.tls_cert, "AGL_TLS_CERT"), _read(settings.tls_key, "AGL_TLS_KEY")
        authority = _read(settings.tls_client_ca, "AGL_TLS_CLIENT_CA") if settings.tls_client_ca else None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
            if authority is not None:
                context.load_verify_locations(cadata=authority.decode())
                context.verify_mode = ssl.CERT_OPTIONAL
        except (ssl.SSLError, ValueError) as error:
            files = ", ".join(filter(None, (settings.tls_cert, settings.tls_key, settings.tls_client_ca)))
            raise SettingsError(f"the TLS files {files} cannot be used: {error}") from None
        return cls(certificate, key, authority, context)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For the gRPC port; with a client authority no client comes in without a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.client_authority, require_client_auth=self.client_authority is not None
        )


class TlsListener:
    """Listens on (host, port) and hands TLS connections to `factory`'s protocols. Raises OSError where it cannot listen."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], tls: Tls, host: str, port: int) -> None:
        self._factory = factory
        self._tls = tls
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
                await loop.connect_accepted_socket(self._factory, connection, ssl=self._tls.context)
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
    text = f"this port speaks TLS: use https://HOST:{port} (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_CERTIFICATE)\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + text


def peer_has_certificate(transport: Any) -> bool:
    """Whether the client of an HTTP connection showed a certificate (which the handshake then has checked)."""
    return bool(transport is not None and transport.get_extra_info("peercert"))


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting} names {path}, which cannot be read: {error.strerror or error}") from None
