"""A service's presence: it says where it is again and again, and takes leave at the end.

What the queue has not heard of for HOLDS_SECONDS it describes no more: a killed collector must not stop every reader's barrier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from agl_otel.errors import AglError
from agl_otel.queue.client import QueueClient

HOLDS_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = HOLDS_SECONDS / 3
RETRY_SECONDS: Final = 1.0
FAREWELL_SECONDS: Final = 2.0  # the queue may be gone before us
_log = logging.getLogger(__name__)


class Presence:
    """One service's announcements, as a task of the running loop from `start` to `leave`."""

    def __init__(self, queue: QueueClient, service: str, instance: str, addresses: Mapping[str, str]) -> None:
        self._queue = queue
        self._service = service
        self._instance = instance
        self._addresses = dict(addresses)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; returns at once, whether the queue is there or not."""
        self._task = asyncio.create_task(self._announce(), name="announce")

    async def leave(self) -> None:
        """Say that the service has gone, if the queue is there to hear it."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._queue.announce(self._service, self._instance, self._addresses, gone=True)
        except (AglError, TimeoutError) as error:
            _log.warning("the queue was not told that the %s has gone: %s", self._service, error)

    async def _announce(self) -> None:
        heard = True
        while True:
            try:
                await self._queue.announce(self._service, self._instance, self._addresses, seconds=HOLDS_SECONDS)
            except AglError as error:
                if heard:
                    _log.warning("the queue does not take the address of the %s; trying again: %s", self._service, error)
                heard = False
                await asyncio.sleep(RETRY_SECONDS)
            else:
                heard = True
                await asyncio.sleep(AGAIN_SECONDS)
