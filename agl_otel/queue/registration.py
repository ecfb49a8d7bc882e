"""Registers a service with the queue, renews the registration, deregisters on shutdown.

A registration that is not renewed for HOLDS_SECONDS expires, so that a killed collector does not block every reader's barrier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from agl_otel.errors import AglError
from agl_otel.queue.client import QueueClient

HOLDS_SECONDS: Final = 60.0
RENEW_SECONDS: Final = HOLDS_SECONDS / 3
RETRY_SECONDS: Final = 1.0
DEREGISTER_SECONDS: Final = 2.0  # the queue may have stopped before this service
_log = logging.getLogger(__name__)


class Registration:
    """One service's registration, renewed by a task of the running loop from `start` to `end`."""

    def __init__(self, queue: QueueClient, service: str, instance: str, addresses: Mapping[str, str]) -> None:
        self._queue = queue
        self._service = service
        self._instance = instance
        self._addresses = dict(addresses)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start registering in the background; return at once, even while the queue is down."""
        self._task = asyncio.create_task(self._renew(), name="registration")

    async def end(self) -> None:
        """Stop renewing and deregister; a queue that does not answer costs a warning only."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS):
                await self._queue.announce(self._service, self._instance, self._addresses, gone=True)
        except (AglError, TimeoutError) as error:
            _log.warning("the %s could not be deregistered from the queue: %s", self._service, str(error) or "no answer")

    async def _renew(self) -> None:
        registered = True
        while True:
            try:
                await self._queue.announce(self._service, self._instance, self._addresses, seconds=HOLDS_SECONDS)
            except AglError as error:
                if registered:
                    _log.warning("the %s is not registered with the queue; trying again: %s", self._service, error)
                registered = False
                await asyncio.sleep(RETRY_SECONDS)
            else:
                registered = True
                await asyncio.sleep(RENEW_SECONDS)
