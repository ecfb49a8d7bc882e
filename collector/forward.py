"""Forward a copy of every accepted request to the user's own OTLP endpoint, which may be slow or down without affecting ingest.

The copy is the original protobuf bytes, without the ids that we add. Copies wait in bounded memory; a copy that finds no room, is refused
by the endpoint or grows too old is counted and dropped. No acknowledgement waits for forwarding.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from agl_otel.collector.forward_targets import GrpcTarget, HttpTarget, RefusedError, TryAgainError
from agl_otel.collector.journal import Signal
from agl_otel.errors import SettingsError
from agl_otel.service.retry import Backoff, Tries
from agl_otel.settings import parse_headers

WORKERS: Final = 4  # requests in flight at a time
BACKOFF: Final = Backoff(0.5, 30.0)
QUEUE_BYTES: Final = 64 << 20  # limit on waiting copies; beyond it copies are dropped and counted, never originals
MAX_AGE_SECONDS: Final = 300.0  # an older copy is of no use; the original is in our own store
GRPC_SCHEMES: Final = {"grpc": False, "grpcs": True}
_logger = logging.getLogger(__name__)


class Target(Protocol):
    """The destination of copies."""

    async def send(self, signal: Signal, raw: bytes) -> None:
        """Deliver one copy. Raises TryAgainError or RefusedError."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class _Copy(NamedTuple):
    signal: Signal
    raw: bytes
    since: float


class Forwarder:
    """Sends copies to `target`; start it with `run()` as a task."""

    def __init__(self, target: Target, name: str, *, max_queue_bytes: int = QUEUE_BYTES) -> None:
        self._target = target
        self._name = name
        self._max_bytes = max_queue_bytes
        self._waiting: deque[_Copy] = deque()
        self._wake = asyncio.Semaphore(0)
        self._unfinished = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.queued_bytes = 0
        """Size of the copies that wait or are in flight."""
        self.counts: Counter[str] = Counter()
        """Requests: sent, retries, dropped_full, dropped_refused, dropped_expired, dropped_stopped."""

    def offer(self, signal: Signal, raw: bytes) -> None:
        """Queue a copy, or drop and count it. Never blocks."""
        if self.queued_bytes + len(raw) > self._max_bytes:
            self._drop("full", "it does not keep up")
            return
        self.queued_bytes += len(raw)
        self._unfinished += 1
        self._idle.clear()
        self._waiting.append(_Copy(signal, raw, time.monotonic()))
        self._wake.release()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def drain(self, timeout_seconds: float) -> None:
        """Wait up to `timeout_seconds` for the queue to empty; the rest is counted as dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        if self._unfinished:
            self.counts["dropped_stopped"] += self._unfinished
            _logger.warning("stopping with %d requests that were not forwarded to %s", self._unfinished, self._name)

    async def close(self) -> None:
        """Close connections."""
        await self._target.close()

    async def _work(self) -> None:
        while True:
            await self._wake.acquire()
            copy = self._waiting.popleft()
            await self._deliver(copy)
            self.queued_bytes -= len(copy.raw)
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.set()

    async def _deliver(self, copy: _Copy) -> None:
        tries = Tries(BACKOFF, seconds=copy.since + MAX_AGE_SECONDS - time.monotonic())
        while True:
            try:
                await self._target.send(copy.signal, copy.raw)
            except RefusedError as error:
                self._drop("refused", str(error))
                return
            except TryAgainError as error:
                if (pause := tries.pause(at_least=error.wait_seconds)) is None:
                    self._drop("expired", str(error))
                    return
                self.counts["retries"] += 1
                if self.counts["retries"] == 1:
                    _logger.warning("forwarding to %s: it does not answer well; trying again: %s", self._name, error)
                await asyncio.sleep(pause)
                continue
            self.counts["sent"] += 1
            return

    def _drop(self, reason: str, why: str) -> None:
        self.counts[f"dropped_{reason}"] += 1
        dropped = self.counts[f"dropped_{reason}"]
        if dropped == 1 or dropped % 1000 == 0:
            _logger.warning("forwarding to %s: %d requests dropped (%s): %s", self._name, dropped, reason, why)


def make_target(endpoint: str, headers: str) -> Target:
    """Make the target that the settings `forward_otlp` and `forward_headers` name. Raises SettingsError."""
    parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    pairs = parse_headers(headers, "AGL_FORWARD_HEADERS")
    if parts.scheme in GRPC_SCHEMES and parts.hostname and parts.port:
        return GrpcTarget(f"{parts.hostname}:{parts.port}", pairs, tls=GRPC_SCHEMES[parts.scheme])
    if parts.scheme in ("http", "https") and parts.hostname:
        return HttpTarget(endpoint.rstrip("/"), pairs)
    raise SettingsError(
        f"AGL_FORWARD_OTLP {endpoint!r} is no OTLP endpoint: write http://HOST:4318, https://…, grpc://HOST:4317 or grpcs://…"
    )
