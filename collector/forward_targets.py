"""Forward over OTLP/HTTP or OTLP/gRPC: send one request, and classify the response."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from typing import Final

import aiohttp
import grpc
import grpc.aio

from agl_otel.collector.journal import Signal
from agl_otel.collector.signals import PROTOCOLS
from agl_otel.telemetry.otlp import RETRYABLE, RETRYABLE_STATUSES

SEND_SECONDS: Final = 30.0
GZIP_BYTES: Final = 1024  # bodies of at least this size are compressed
_THREAD_BYTES: Final = 64 << 10
_BY_SIGNAL: Final = {protocol.signal: protocol for protocol in PROTOCOLS}


class TryAgainError(Exception):
    """The same request may succeed later, after at least `wait_seconds`."""

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        self.wait_seconds = wait_seconds
        super().__init__(message)


class RefusedError(Exception):
    """Sending this again cannot succeed."""


class HttpTarget:
    """OTLP over HTTP to `base` (http://host:4318, without /v1/…)."""

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        self._base = base
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._session: aiohttp.ClientSession | None = None

    async def send(self, signal: Signal, raw: bytes) -> None:
        """Deliver one copy. Raises TryAgainError or RefusedError."""
        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SEND_SECONDS))
        headers, body = self._headers, raw
        if len(raw) >= GZIP_BYTES:
            headers = {**headers, "Content-Encoding": "gzip"}
            body = await asyncio.to_thread(gzip.compress, raw, 1) if len(raw) >= _THREAD_BYTES else gzip.compress(raw, 1)
        url = self._base + _BY_SIGNAL[signal].path
        try:
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                status, text = response.status, (await response.content.read(300)).decode(errors="replace")
                wait = response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TryAgainError(f"{url}: {error or type(error).__name__}") from None
        if status in RETRYABLE_STATUSES:
            raise TryAgainError(f"{url} answers {status}: {text}", float(wait) if wait.isdigit() else 0.0)
        if not 200 <= status < 300:
            raise RefusedError(f"{url} answers {status}: {text}")

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()


class GrpcTarget:
    """OTLP over gRPC to `address` (host:port)."""

    def __init__(self, address: str, headers: Mapping[str, str], *, tls: bool) -> None:
        self._address = address
        self._metadata = tuple(headers.items())
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def send(self, signal: Signal, raw: bytes) -> None:
        """Deliver one copy. Raises TryAgainError or RefusedError."""
        channel = self._channel
        if channel is None:
            options = [("grpc.max_send_message_length", -1)]
            if self._tls:
                channel = grpc.aio.secure_channel(self._address, grpc.ssl_channel_credentials(), options=options)
            else:
                channel = grpc.aio.insecure_channel(self._address, options=options)
            self._channel = channel
        call = channel.unary_unary(_BY_SIGNAL[signal].method, request_serializer=None, response_deserializer=None)
        try:
            await call(raw, timeout=SEND_SECONDS, metadata=self._metadata, compression=grpc.Compression.Gzip)
        except grpc.aio.AioRpcError as error:
            message = f"{self._address} answers {error.code().name}: {error.details()}"
            raise (TryAgainError(message) if error.code() in RETRYABLE else RefusedError(message)) from None

    async def close(self) -> None:
        """Close connections."""
        if self._channel is not None:
            await self._channel.close(None)
