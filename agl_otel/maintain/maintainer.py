"""Maintains a stack's stores: the late pass, adoption, the schema, purges and retention, under a lease at the queue.

The passes are in collector/maintenance.py. On a ClickHouse server (AGL_CLICKHOUSE_URL) they run in this process, which also creates the
schema. An embedded ClickHouse is open in its collector alone, so this process requests each pass from the collector. Either way it holds
the lease and renews it during a pass. The start of the last pass is remembered, so that the next one covers only what is newer; a new
holder of the lease begins with a full pass. `agl-otel up` runs one as a service.

Several maintainers may run, for example one per machine: one holds the lease, the others wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import aiohttp

from agl_otel.collector.maintenance import Maintenance
from agl_otel.errors import AglError, ConflictError, UnavailableError
from agl_otel.maintain.stored import NO_COLLECTOR, empty_log, stored_parts
from agl_otel.queue.client import QueueClient
from agl_otel.queue.sqlite import sqlite_path
from agl_otel.settings import DAY_SECONDS, Settings
from agl_otel.stack.supervisor import running_address
from agl_otel.traces.collector_client import posting
from agl_otel.traces.opened import CHDB_SCHEME, open_store
from agl_otel.types import RolloutStatus

LEASE: Final = "maintain"
LEASE_SECONDS: Final = 30.0
INTERVAL_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 6 * 3600.0  # between full passes
PURGE_SECONDS: Final = 6 * 3600.0  # between purges: deleted rows leave all files within 24 hours, even if one purge fails
PURGE_AGAIN_SECONDS: Final = 3600.0  # after a purge that failed
PRUNE_SECONDS: Final = 3600.0  # between removals of rollouts past the retention
PAGE: Final = 500  # rollouts of one query
Report = dict[str, float]
Work = Callable[[float], Awaitable[Report]]
Purge = Callable[[], Awaitable[None]]
SUMMARY: Final = (
    "copied %(spans)d spans and %(logs)d logs, left %(ambiguous)d ambiguous evaluations, adopted %(adopted)d traces, "
    "removed %(pruned)d old rollouts from the queue"
)
_logger = logging.getLogger("agl_otel.maintain")


class Maintainer:
    """Runs `work(since)` repeatedly under the lease, with `holder` as its name at the queue.

    With `retention_days` it also removes rollouts from the queue that finished longer ago than that by `clock` (Unix seconds) and
    clears them from the embedded queue's file `database`; ClickHouse drops their spans by its TTL. `purge` clears deleted rows from
    files; it is called in the first pass and every PURGE_SECONDS.
    """

    def __init__(
        self,
        queue: QueueClient,
        work: Work,
        *,
        holder: str = "",
        lease_seconds: float = LEASE_SECONDS,
        retention_days: int = 0,
        database: Path | None = None,
        purge: Purge | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue = queue
        self._retention_days = retention_days
        self._database = database
        self._purge_files = purge
        self._purge_at = 0.0
        self._clock = clock
        self._prune_at = 0.0
        self._work = work
        self._holder = holder or f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self._lease_seconds = lease_seconds
        self._since = 0.0
        self._swept = 0.0

    async def once(self) -> Report | None:
        """Run one pass; None if another maintainer holds the lease. Raises ConflictError if the lease is lost during the pass."""
        if not await self._queue.lease(LEASE, self._holder, self._lease_seconds):
            self._since = 0.0
            return None
        since, self._since = self._since, 0.0  # 0 until this pass has ended: if it fails, only a full pass repairs the sums that it leaves
        task = asyncio.ensure_future(self._pass(since))
        renewal = asyncio.ensure_future(self._renew_lease())
        try:
            await asyncio.wait({task, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                renewal.result()  # raises the reason for the loss of the lease
            report = await task
        finally:
            for future in (task, renewal):
                future.cancel()
            await asyncio.gather(task, renewal, return_exceptions=True)
        self._swept = self._swept if since else report["began"]
        self._since = report["began"] if report["began"] - self._swept < SWEEP_SECONDS else 0.0
        return report

    async def _pass(self, since: float) -> Report:
        report = await self._work(since)
        pruned = await self._prune()
        await self._purge()
        return {**report, "pruned": pruned}

    async def _prune(self) -> int:
        now = self._clock()
        if not self._retention_days or now < self._prune_at:
            return 0
        pruned = 0
        async for ids in finished_before(self._queue, (), now - self._retention_days * DAY_SECONDS):
            pruned += await self._queue.delete(ids)
        if pruned and self._database is not None and self._database.exists():  # else the queue is on another machine
            await asyncio.to_thread(empty_log, self._database)
        self._prune_at = now + PRUNE_SECONDS
        return pruned

    async def _purge(self) -> None:
        now = self._clock()
        if self._purge_files is None or now < self._purge_at:
            return
        self._purge_at = now + PURGE_AGAIN_SECONDS
        await self._purge_files()
        self._purge_at = now + PURGE_SECONDS

    async def _renew_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            if not await self._queue.lease(LEASE, self._holder, self._lease_seconds):
                raise ConflictError("another maintainer holds the lease now: this pass ends")

    async def run(self, interval_seconds: float) -> NoReturn:
        """Run passes until cancelled; a failed pass is repeated."""
        failures = 0
        while True:
            try:
                report = await self.once()
            except AglError as error:
                failures += 1
                if failures in (3, 10) or failures % 100 == 0:  # the collector may still be starting
                    _logger.warning("maintenance cannot be done now; trying again: %s", error)
            else:
                failures = 0
                if report and any(count for name, count in report.items() if name != "began"):
                    _logger.info(SUMMARY, report)
            await asyncio.sleep(interval_seconds)

    async def release(self) -> None:
        """Release the lease if the queue is reachable."""
        with contextlib.suppress(AglError, TimeoutError):
            async with asyncio.timeout(2):
                await self._queue.lease(LEASE, self._holder, 0)


async def finished_before(queue: QueueClient, statuses: Sequence[RolloutStatus], before: float) -> AsyncIterator[list[str]]:
    """Yield pages of ids of rollouts that ended before a time (Unix seconds); the caller deletes each page."""
    while page := await queue.query_rollouts(status_in=statuses or None, ended_before=before, limit=PAGE):
        yield [item.rollout_id for item in page]


@contextlib.asynccontextmanager
async def maintainer(settings: Settings) -> AsyncGenerator[Maintainer]:
    """Open a maintainer of the stack that the settings name; release its lease at the end."""
    token = settings.token.get_secret_value()
    async with contextlib.AsyncExitStack() as closers:
        queue = await closers.enter_async_context(QueueClient(queue_address(settings), token=token))
        stored = await closers.enter_async_context(stored_parts(settings, queue))
        if settings.clickhouse_db.startswith(CHDB_SCHEME):
            work: Work = partial(request_pass, queue, stored.session)
        else:
            engine = await asyncio.to_thread(open_store, settings.clickhouse_db)
            closers.callback(engine.close)
            maintenance = Maintenance(engine, queue, adopt_after=settings.adopts_after)
            closers.push_async_callback(maintenance.close)
            work = maintenance.run
        made = Maintainer(queue, work, retention_days=settings.retention_days, database=sqlite_path(settings.queue_db), purge=stored.purge)
        closers.push_async_callback(made.release)
        yield made


def queue_address(settings: Settings) -> str:
    """Return the queue's address: from the settings, else of the stack running on the data directory, else the default."""
    return running_address(settings) or settings.queue_address


async def request_pass(queue: QueueClient, session: aiohttp.ClientSession, since: float) -> Report:
    """Request one pass from the stack's collector. Raises UnavailableError if there is no collector or its pass fails."""
    collectors = (await queue.describe()).collectors
    if not collectors:
        raise UnavailableError(NO_COLLECTOR)
    url = f"{collectors[0].rstrip('/')}/maintain"
    async with posting(session, url, body={"since": since}, seconds=None, unable="does no maintenance") as answer:
        return await answer.json()
