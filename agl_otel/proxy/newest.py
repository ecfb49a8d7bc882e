"""The newest version of a set of resources, for calls of no rollout: looked up at most once a second, and only while there are calls.

A call waits for a look-up that has just begun, so that it sees what was published a second before it; not longer, so that the last known
version goes on serving while the queue is away. The first call after a pause waits longer, for what it knows may be long gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from agl_otel.errors import AglError
from agl_otel.types import ResourcesUpdate

REFRESH_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 0.25  # a call's longest wait for a look-up
FIRST_WAIT_SECONDS: Final = 2.0  # for the first one, without which calls would go elsewhere, and for one after a pause
PAUSE_SECONDS: Final = 3.0  # without a call
LOOK_UP_SECONDS: Final = 10.0
logger = logging.getLogger("agl_otel.proxy")
LookUp = Callable[[str], Awaitable[ResourcesUpdate | None]]
"""Returns the current version of a set; None if there is no such set. Raises AglError."""


class Newest:
    """The newest version of the set `resources_id`. Use it in one event loop."""

    def __init__(self, look_up: LookUp, resources_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.resources_id = resources_id
        self.answered = False
        """Whether the queue has answered yet."""
        self._look_up = look_up
        self._clock = clock
        self._found: ResourcesUpdate | None = None
        self._away = False
        self._until = 0.0
        """For so long a call waits for the look-up that is under way."""
        self._called = self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> ResourcesUpdate | None:
        """Return the newest known version, the same object while it stays; None if there is no such set."""
        now = self._clock()
        if self._asking is None and now - self._asked >= REFRESH_SECONDS:
            after_pause = now - self._called > PAUSE_SECONDS and not self._away
            self._until = now + (FIRST_WAIT_SECONDS if after_pause else WAIT_SECONDS)
            self._asked, self._asking = now, asyncio.create_task(self._ask(), name="newest")
        self._called = now
        if self._asking is not None and self._until > now:
            await asyncio.wait({self._asking}, timeout=self._until - now)
        return self._found

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                found = await self._look_up(self.resources_id)
        except (AglError, TimeoutError) as error:
            if not self._away:
                logger.warning("the resources %s cannot be looked up, and are served as they were: %s", self.resources_id, error)
            self._away = True
        else:
            self.answered, self._away = True, False
            if found != self._found:
                self._found = found
        finally:
            self._asking = None
