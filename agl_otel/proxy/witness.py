"""Before this process forwards the first call of an attempt, the queue knows of it: so a proxy that dies is missed.

Announcements that come together go in one message. A queue that is away holds a call up for a while only: then it is forwarded, the
announcement follows when the queue is back, and until then the journal alone knows of the call. One that refuses is asked again with the
next call of the attempt.
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
    """What of the queue's client is needed here."""

    async def witness(self, witnesses: Sequence[Witness]) -> None:
        """Note who forwards calls of attempts."""
        ...


class Witnesses:
    """Announces attempts to the queue, for the proxy at `address`. Use it in one event loop; `close` it.

    `counts["unwitnessed"]` says how often a call was forwarded that the queue was not told of in time, or did not take note of.
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
        """Whether it was said that the queue refuses."""

    async def announce(self, key: Key, marker: str) -> None:
        """Return when the queue knows that this process forwards calls of the attempt under `marker`, refuses, or is away for too long."""
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
            taken = await asyncio.wait_for(asyncio.shield(told), self._wait_seconds)
        except TimeoutError:
            taken = False
        if not taken:
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
            refused: Exception | None = None
            try:
                await self._queue.witness([Witness(*key, marker, self._address) for key, marker, _ in batch])
            except Exception as error:  # noqa: BLE001 - the boundary: calls are forwarded, and their attempts shown as not announced
                if isinstance(error, AglError) and error.retryable:
                    _logger.warning("the queue was not told of %d attempts that this proxy serves; trying again: %s", len(batch), error)
                    self._waiting = [*batch, *self._waiting]
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                refused = error
            self._say(refused)
            for key, _, told in batch:
                if refused is not None and self._known.get(key, ("", None))[1] is told:
                    del self._known[key]
                told.set_result(refused is None)

    def _say(self, refused: Exception | None) -> None:
        if refused is not None and not self._refused:
            _logger.error(
                "the queue does not take note of attempts that this proxy serves (said once; see the counts of /health): %s",
                refused,
                exc_info=None if isinstance(refused, AglError) else refused,
            )
        self._refused = refused is not None
