"""What is past the setting retention_days leaves the collector's files, too; ClickHouse drops rows by itself.

A quiet collector's log keeps what is stored until its segment is full; dead letters (dead_letters.py) stay for a person to look at. With
a retention both end with it: once an hour the log goes on in a new segment, and what was received before the retention is removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

from agl_otel.errors import AglError
from agl_otel.settings import DAY_SECONDS

INTERVAL_SECONDS: Final = 3600.0  # days are kept: an hour more is no matter
_logger = logging.getLogger(__name__)


class Files(Protocol):
    """What holds them; the writer."""

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
        """Remove it now; how many dead letters. Raises UnavailableError, OSError."""
        return await self._files.expire(self._clock() - self._days * DAY_SECONDS)

    async def run(self) -> NoReturn:
        """Every hour, until cancelled; what cannot be done now is tried with the next."""
        while True:
            try:
                if gone := await self.once():
                    _logger.info("removed %d dead letters that were older than %d days", gone, self._days)
            except (AglError, OSError) as error:
                _logger.warning("files that are past the retention cannot be removed now; trying again: %s", error)
            await asyncio.sleep(INTERVAL_SECONDS)
