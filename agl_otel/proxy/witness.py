"""Announce each attempt to the queue before its first call is forwarded, so that the death of a proxy is noticed.

Concurrent announcements are batched. If the queue is unreachable, a call waits for at most WAIT_SECONDS and is then forwarded; the
announcement is retried, and until it succeeds only the journal has a record of the call. After a refusal the next call of the attempt
announces it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from agl_otel.errors import AglError
from agl_otel.queue.updates import Witness
from agl_otel_hook.context import Key

WAIT_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 1.0
MAX_KNOWN: Final = 100_000
_logger = logging.getLogger("agl_otel.proxy")


class Queue(Protocol):
    """The part of the queue's client that is used here."""

    async def witness(self, witnesses: Sequence[Witness]) -> None:
        """Record which processes forward calls of attempts."""
        ...


class Witnesses:
    """Announces attempts to the queue, for the proxy at `address`. Use it in one event loop; `close` it.

    `counts["unwitnessed"]` counts calls that were forwarded although the announcement was late or refused.
    """

    def __init__(self, queue: Queue, address: str, counts: Counter[str], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._queue = queue
        self._address = address
        self._counts = counts
        self._wait_seconds = wait_seconds
        self._known: dict[Key, tuple[str, asyncio.Future[bool]]] = {}
        self._waiting: list[tuple[Key, str, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None
        self._refused = False
        """Whether a refusal of the queue was logged."""

    async def announce(self, key: Key, marker: str) -> None:
        """Announce that this process forwards calls of the attempt under `marker`; return on success, refusal or timeout."""
        known, announced = self._known.get(key, ("", None))
        if announced is None or known != marker:
            announced = asyncio.get_running_loop().create_future()
            self._known[key] = marker, announced
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._waiting.append((key, marker, announced))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._send(), name="witness")
        if announced.done():
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                taken = await asyncio.shield(announced)
        except TimeoutError:
            taken = False
        if not taken:
            self._counts["unwitnessed"] += 1

    async def close(self) -> None:
        """Cancel pending announcements."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def forget(self, key: Key) -> None:
        """Forget the attempt; its next call announces it again."""
        self._known.pop(key, None)

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            refused: Exception | None = None
            try:
                await self._queue.witness([Witness(*key, marker, self._address) for key, marker, _ in batch])
            except Exception as error:  # noqa: BLE001 - the boundary: calls are forwarded, and their attempts shown as not announced
                if isinstance(error, AglError) and error.retryable:
                    _logger.warning(
                        "%d attempts that this proxy serves could not be announced to the queue; trying again: %s", len(batch), error
                    )
                    self._waiting = [*batch, *self._waiting]
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                refused = error
            self._log_refusal(refused)
            for key, _, announced in batch:
                if refused is not None and self._known.get(key, ("", None))[1] is announced:
                    del self._known[key]
                announced.set_result(refused is None)

    def _log_refusal(self, refused: Exception | None) -> None:
        if refused is not None and not self._refused:
            _logger.error(
                "the queue refuses announcements of attempts that this proxy serves (logged once; /health has the count): %s",
                refused,
                exc_info=None if isinstance(refused, AglError) else refused,
            )
        self._refused = refused is not None
