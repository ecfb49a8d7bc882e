"""Everything that is stored about rollouts outside the queue's tables: deleting it, and clearing deleted rows from files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from agl_otel.collector.deletion import Deletion
from agl_otel.errors import UnavailableError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.sqlite import sqlite_path
from agl_otel.settings import Settings
from agl_otel.traces.collector_client import barriers, open_session, posting, purge
from agl_otel.traces.opened import CHDB_SCHEME, open_store

DELETE_SECONDS: Final = 600.0  # for one chunk; each table is scanned once
NO_COLLECTOR: Final = "no collector has registered: start one with `agl-otel up`, or name a server with AGL_CLICKHOUSE_URL"
_logger = logging.getLogger("agl_otel.maintain")


class Stored(NamedTuple):
    """Everything stored about rollouts outside the queue's tables."""

    queue: QueueClient
    session: aiohttp.ClientSession
    deletion: Deletion | None
    """Deletion on a ClickHouse server; None if ClickHouse is embedded in a collector."""
    database: Path | None
    """The file of an embedded queue, which may be on another machine."""

    async def delete(self, ids: Sequence[str]) -> None:
        """Delete the data of these rollouts; without ids, check that deletion is possible. Raises UnavailableError, ClickHouseError."""
        described = await self.queue.describe()
        collectors = [address.rstrip("/") for address in described.collectors]
        if not collectors and self.deletion is None:
            raise UnavailableError(NO_COLLECTOR)
        await barriers(self.session, collectors, rollout_ids=ids)
        if ids:
            await self._delete_from_proxies(described.proxies, ids)
        if self.deletion is not None:
            await self.deletion.run(ids)
            return
        url, body = f"{collectors[0]}/delete", {"rollouts": list(ids)}
        async with posting(self.session, url, body=body, seconds=DELETE_SECONDS, unable="deletes nothing"):
            pass

    async def _delete_from_proxies(self, proxies: Sequence[str], ids: Sequence[str]) -> None:
        for address in proxies:
            try:
                async with posting(self.session, f"{address.rstrip('/')}/delete", body={"rollouts": list(ids)}, seconds=DELETE_SECONDS):
                    pass
            except UnavailableError as error:  # at its next start, the proxy drops rollouts that the queue does not know
                _logger.warning("the proxy at %s cannot be reached, and forgets them when it starts again: %s", address, error)

    async def purge(self) -> None:
        """Clear deleted rows from every file: ClickHouse's parts, and the logs of collectors and of the embedded queue.

        Raises UnavailableError, ClickHouseError; it may be repeated then.
        """
        collectors = [address.rstrip("/") for address in (await self.queue.describe()).collectors]
        await purge(self.session, collectors)
        if self.deletion is not None:
            await self.deletion.purge()
        if self.database is not None and self.database.exists():
            await asyncio.to_thread(empty_log, self.database)


@contextlib.asynccontextmanager
async def stored_parts(settings: Settings, queue: QueueClient) -> AsyncGenerator[Stored]:
    """Open the stored parts of the stack that the settings name."""
    async with contextlib.AsyncExitStack() as closers:
        session = await closers.enter_async_context(open_session(settings.token.get_secret_value()))
        deletion = None
        if not settings.clickhouse_db.startswith(CHDB_SCHEME):
            engine = await asyncio.to_thread(open_store, settings.clickhouse_db)
            closers.callback(engine.close)
            deletion = Deletion(engine)
        yield Stored(queue, session, deletion, sqlite_path(settings.queue_db))


def empty_log(database: Path) -> None:
    """Empty the write-ahead log of the embedded queue: SQLite overwrites deleted rows (secure_delete), but its log still holds them.

    Raises UnavailableError if a reader blocks it.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as opened:
        (busy, *_) = opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise UnavailableError(f"{database}-wal is being read and still holds what was deleted: try again")
