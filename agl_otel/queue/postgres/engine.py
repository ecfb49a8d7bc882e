"""The engine over PostgreSQL: a few threads for writes and a few for reads, each with its own connection.

Operations run concurrently, in this service and in the others on the database; PostgreSQL isolates them (dialect.py) and groups the
syncs of commits. Signals reach this process directly, the other services through signals.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from agl_otel.errors import UnavailableError
from agl_otel.queue.engine import Instrumented, Operation
from agl_otel.queue.postgres import dialect, session
from agl_otel.queue.postgres.address import Address
from agl_otel.queue.postgres.schema import create_tables
from agl_otel.queue.postgres.signals import Exchange, server_clock_ahead

T = TypeVar("T")
WRITERS: Final = 2
READERS: Final = 2


class _Job(NamedTuple):
    operation: Operation[Any]
    begin: bytes
    future: asyncio.Future[Any]


class PostgresEngine(Instrumented):
    """An engine.Engine. Create it inside the event loop that uses it. `url` is libpq's; at most 5 connections are open.

    Raises SettingsError (refused, no rights), UnavailableError (does not answer), ConflictError (tables of another version or program).
    """

    name = "postgresql"

    def __init__(self, url: str, *, writers: int = WRITERS, readers: int = READERS) -> None:
        super().__init__()
        self._address = Address.parse(url)
        self.where = self._address.shown
        self._loop = asyncio.get_running_loop()
        with self._address.connect() as connection:
            schema = create_tables(connection, self._address)
            clock_ahead = server_clock_ahead(connection)
        self._statements = dialect.statements()
        self._stopping = False
        self._writes: SimpleQueue[_Job | None] = SimpleQueue()
        self._reads: SimpleQueue[_Job | None] = SimpleQueue()
        channel = "agl_queue_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self._exchange = Exchange(self._address, channel, lambda signals: self._on_loop(self._signal, signals), clock_ahead)
        kinds = [("write", self._writes, session.LOOK_UP, writers), ("read", self._reads, session.PLAN_EACH, readers)]
        self._threads = [
            threading.Thread(target=self._work, args=(queue, planner), name=f"queue-{kind}-{i}", daemon=True)
            for kind, queue, planner, count in kinds
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Return Unix seconds by the database's clock, so that services on different machines agree on which attempts are overdue."""
        return time.time() + self._exchange.clock_ahead

    def write(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run an operation as soon as a connection is free; durable when the future is done."""
        return self._timed("write", self._submit(self._writes, operation, session.WRITE))

    async def read(self, operation: Operation[T]) -> T:
        """Run an operation on one consistent state."""
        return await self._timed("read", self._submit(self._reads, operation, session.READ))

    async def close(self) -> None:
        """Finish waiting operations, then close all connections."""
        if self._stopping:
            return
        self._stopping = True
        for thread in self._threads:
            (self._writes if thread.name.startswith("queue-write") else self._reads).put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._exchange.close)
        await asyncio.sleep(0)  # lets the loop run the threads' last callbacks

    def _submit(self, queue: SimpleQueue[_Job | None], operation: Operation[T], begin: bytes) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._stopping:
            future.set_exception(UnavailableError("the queue is stopping: try again when it is back"))
        else:
            queue.put(_Job(operation, begin, future))
        return future

    # --- the worker threads

    def _work(self, jobs: SimpleQueue[_Job | None], planner: bytes) -> None:
        connection = session.Session(self._address, self._statements, planner)
        while (job := jobs.get()) is not None:
            if job.future.cancelled():
                continue
            try:
                done = connection.run(job.operation, job.begin)
            except Exception as error:  # noqa: BLE001 - the boundary: the error is raised to the operation's caller
                self._on_loop(self._fail, job.future, error)
                continue
            self._on_loop(self._deliver, job.future, done)
            if done.signals:
                self._exchange.publish(done.signals)
        connection.close()

    def _on_loop(self, callback: Callable[..., None], *values: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits any more
            self._loop.call_soon_threadsafe(callback, *values)

    # --- on the event loop

    def _deliver(self, future: asyncio.Future[Any], done: session.Done) -> None:
        if done.signals:
            self._signal(done.signals)
        if not future.cancelled():
            future.set_result(done.result)

    def _fail(self, future: asyncio.Future[Any], error: Exception) -> None:
        if not future.cancelled():
            future.set_exception(error)
