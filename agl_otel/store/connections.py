"""The connections below all parts of the store: opened on first use, one set per event loop that uses the store.

Several `asyncio.run` calls and threads may share one store object. An asynchronous generator holds a loop's connections, and the loop
closes it at its end (`loop.shutdown_asyncgens`), so nothing must be closed by hand between two `asyncio.run` calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final, Protocol, TypedDict

from agl_otel.errors import UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.store.address import queue_address
from agl_otel.types import Describe

if TYPE_CHECKING:
    from agl_otel.store.write import SpanWriter
    from agl_otel.traces.reader import TraceReader


class Statistics(TypedDict, total=False):
    """The counts of a store."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    rollouts_by_status: dict[str, int]
    claimable: int
    oldest_claimable_age_seconds: float | None


class Source(Protocol):
    """The location of a stack, or the means to start one."""

    @property
    def token(self) -> str:
        """The bearer token of the stack; empty means none."""
        ...

    def queue_address(self) -> str:
        """Return the stack's address as soon as its queue runs; may block. Raises UsageError, UnavailableError."""
        ...

    def address(self) -> str:
        """Return the stack's address when all its services run; may block (see `agl_otel.store.address`). Raises as `queue_address`."""
        ...

    def check(self) -> None:
        """Raise UnavailableError if what was started for the store has ended by itself."""
        ...

    def stop(self) -> None:
        """Stop what was started for the store; may block."""
        ...


class Connection:
    """The connections of one event loop."""

    def __init__(self, queue: QueueClient, description: Describe, token: str) -> None:
        self.queue = queue
        self.description = description
        self._token = token
        self._reader: TraceReader | None = None
        self._writer: SpanWriter | None = None

    @classmethod
    async def open(cls, address: str, token: str) -> Connection:
        """Connect to the stack at `address`. Raises UsageError, UnavailableError."""
        queue = QueueClient(await queue_address(address, token), token=token)
        try:
            return cls(queue, await queue.describe(), token)
        except BaseException:
            await queue.close()
            raise

    @property
    def reader(self) -> TraceReader:
        """Reads from ClickHouse."""
        if self._reader is None:
            from agl_otel.traces.reader import TraceReader  # numpy and aiohttp, which a user of the queue does not need

            found = self.description
            url, endpoints, collectors = found.clickhouse or "", found.clickhouses, found.collectors
            self._reader = TraceReader(url, endpoints=endpoints, collectors=collectors, token=self._token, where=self.queue.describe)
        return self._reader

    @property
    def writer(self) -> SpanWriter:
        """Writes to a collector."""
        if self._writer is None:
            from agl_otel.store.write import SpanWriter

            self._writer = SpanWriter(self.queue, token=self._token)
        return self._writer

    async def refresh(self) -> None:
        """Look up again the services that were missing because the stack was still starting."""
        description = await self.queue.describe()
        if description.clickhouse and not self.description.clickhouse:  # else another task has looked, and uses what it found
            before, self._reader, self.description = self._reader, None, description
            if before is not None:
                await before.close()

    async def close(self) -> None:
        """Close all connections."""
        for each in (self._writer, self._reader, self.queue):
            if each is not None:
                await each.close()


CONNECTIONS: Final = frozenset({"_source", "_closed", "_opening", "_held"})
"""The attributes of Connected."""


class Connected:
    """Connections to the stack at `source`, opened on first use."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._closed = False
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[Connection]] = {}
        self._held: dict[asyncio.AbstractEventLoop, AsyncGenerator[Connection]] = {}

    async def _open(self) -> Connection:
        """Return the running loop's connections to all services."""
        connection = await self._connection()
        if connection.description.clickhouse is None:
            await asyncio.to_thread(self._source.address)
            await connection.refresh()
        return connection

    async def _queue(self) -> QueueClient:
        """Return the running loop's connection to the queue, which needs no other service to run."""
        return (await self._connection()).queue

    async def _connection(self) -> Connection:
        if self._closed:
            raise UsageError("this store is closed: make a new one")
        self._source.check()
        loop = asyncio.get_running_loop()
        opening = self._opening.get(loop)
        if opening is None:
            self._forget_closed_loops()
            opening = self._opening[loop] = asyncio.ensure_future(self._connect(loop))
        try:
            return await asyncio.shield(opening)
        finally:
            if opening.done() and (opening.cancelled() or opening.exception() is not None):
                self._opening.pop(loop, None)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Connection:
        address = await asyncio.to_thread(self._source.queue_address)
        self._held[loop] = held = _hold(await Connection.open(address, self._source.token))
        return await anext(held)

    def _forget_closed_loops(self) -> None:
        for loop in [loop for loop in self._opening if loop.is_closed()]:
            self._opening.pop(loop, None)
            self._held.pop(loop, None)

    def _now_open(self) -> Connection:
        opening = self._opening.get(asyncio.get_running_loop())
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            raise UsageError("the store has not been used in this event loop yet: `await Store.connect(…)`, or `async with store`")
        return opening.result()

    async def close(self) -> None:
        """Close the running loop's connections, and stop the stack if it was started for this store.

        Connections of other event loops are closed when those loops end.
        """
        self._closed = True
        loop = asyncio.get_running_loop()
        self._opening.pop(loop, None)
        if (held := self._held.pop(loop, None)) is not None:
            await held.aclose()
        await asyncio.to_thread(self._source.stop)


async def _hold(connection: Connection) -> AsyncGenerator[Connection]:
    try:
        yield connection
    finally:
        await connection.close()
