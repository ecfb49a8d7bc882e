"""Before this process forwards the first call of an attempt, the queue knows of it: so a proxy that dies is missed.

Announcements that come together go in one message. A queue that is away holds a call up for a while only: then it is forwarded, the
announcement follows when the queue is back, and until then the journal alone knows of the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from agl_otel.errors import AglError
from agl_otel.instrumentation.context import Key
from agl_otel.queue.updates import Witness

WAIT_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 1.0
MAX_KNOWN: Final = 100_000
_logger = logging.getLogger("agl_otel.proxy")


class Queue(Protocol):
    """What of the queue's client is needed here."""

    async def witness(self, witnesses: Sequence[Witness]) -> None:
        """Note who forwards calls of attempts."""
        ...


class Witnesses:
    """Announces attempts to the queue, for the proxy at `address`. Use it in one event loop; `close` it.

    `counts["unwitnessed"]` says how often a call was forwarded that the queue could not be told of in time.
    """

    def __init__(self, queue: Queue, address: str, counts: Counter[str], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._queue = queue
        self._address = address
        self._counts = counts
        self._wait_seconds = wait_seconds
        self._known: dict[Key, tuple[str, asyncio.Future[None]]] = {}
        self._waiting: list[tuple[Key, str, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def announce(self, key: Key, marker: str) -> None:
        """Return when the queue knows that this process, under `marker`, forwards calls of the attempt, or was away for too long."""
        known, told = self._known.get(key, ("", None))
        if told is None or known != marker:
            told = asyncio.get_running_loop().create_future()
            self._known[key] = marker, told
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._waiting.append((key, marker, told))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._tell(), name="witness")
        if told.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(told), self._wait_seconds)
        except TimeoutError:
            self._counts["unwitnessed"] += 1

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def forget(self, key: Key) -> None:
        """Announce the attempt again, should it come back."""
        self._known.pop(key, None)

    async def _tell(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._queue.witness([Witness(*key, marker, self._address) for key, marker, _ in batch])
            except AglError as error:
                if error.retryable:
                    _logger.warning("the queue was not told of %d attempts that this proxy serves; trying again: %s", len(batch), error)
                    self._waiting = [*batch, *self._waiting]
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                _logger.warning("the queue does not take note of %d attempts that this proxy serves: %s", len(batch), error)
            for _, _, told in batch:
                told.set_result(None)
