"""Periodic check of the store's disk and tables: ClickHouse reports no error of a merge in the background."""

from __future__ import annotations

import asyncio
from typing import Final

from agl_otel.errors import UnavailableError
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.opened import TraceStore

EMBEDDED_SECONDS: Final = 1.0  # between two checks; each costs about 1 ms of CPU
SERVER_SECONDS: Final = 60.0  # a server finds damaged parts only when it starts


class StoreWatch:
    """Checks `store` periodically. Start it with `run()` as a task."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self.problems: list[str] = []
        """What is wrong: a full disk, or damaged parts whose rows may be lost."""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            try:
                self.problems = await asyncio.to_thread(self._store.check_disk)
            except (UnavailableError, ClickHouseError) as error:
                self.problems = [f"the tables of the store cannot be checked: {error}"]
            await asyncio.sleep(EMBEDDED_SECONDS if self._store.embedded else SERVER_SECONDS)
