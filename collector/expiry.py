"""Apply the setting retention_days to the collector's files; ClickHouse drops its rows by itself.

A quiet collector's log keeps stored requests until its segment is full, and dead letters (dead_letters.py) stay for inspection. With a
retention both are bounded: once an hour the log starts a new segment, and everything received before the retention is removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

from agl_otel.errors import AglError
from agl_otel.settings import DAY_SECONDS

INTERVAL_SECONDS: Final = 3600.0  # retention is in days: an hour more does not matter
_logger = logging.getLogger(__name__)


class Files(Protocol):
    """The files to expire; the writer implements it."""

    async def expire(self, before: float) -> int:
        """See Writer.expire."""
        ...


class Expiry:
    """Removes what was received more than `days` days ago by `clock` (Unix seconds)."""

    def __init__(self, files: Files, days: int, *, clock: Callable[[], float] = time.time) -> None:
        self._files = files
        self._days = days
        self._clock = clock

    async def once(self) -> int:
        """Remove it now; return the number of dead letters. Raises UnavailableError, OSError."""
        return await self._files.expire(self._clock() - self._days * DAY_SECONDS)

    async def run(self) -> NoReturn:
        """Remove it every hour, until cancelled; failures are retried an hour later."""
        while True:
            try:
                if removed := await self.once():
                    _logger.info("removed %d dead letters that were older than %d days", removed, self._days)
            except (AglError, OSError) as error:
                _logger.warning("files that are past the retention cannot be removed now; trying again: %s", error)
            await asyncio.sleep(INTERVAL_SECONDS)
