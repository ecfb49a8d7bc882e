"""Group commit: all waiting requests share one write and one fsync, in a dedicated thread.

The requests of one turn of the event loop are handed to the thread at once: waking it for each would cost more than writing.
Futures complete in log order, on the event loop: when a record is on disk, so is every record before it.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from agl_otel.collector.wal import Log, Place
from agl_otel.errors import UnavailableError

MAX_WAITING_BYTES: Final = 256 << 20  # received, not yet on disk
TRY_SECONDS: Final = 1.0  # between tries of a disk that refused a write: only a write shows whether a quota has room again

T = TypeVar("T")
_Item = tuple[int, bytes, "asyncio.Future[Place]"]
_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class GroupCommit:
    """The asynchronous interface of a Log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[list[_Item] | _Work | None] = queue.SimpleQueue()
        self._turn: list[_Item] = []
        self._closed = False
        self.waiting_bytes = 0
        self.groups = 0
        """Number of fsyncs."""
        self.bytes_held = log.bytes_held
        """Size of the log, as of the last group or release."""
        self.trouble = ""
        """Why the disk refused the last group; empty if it did not, or has room again."""
        self._refused_bytes = 0
        self._next_try: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="wal", daemon=True)
        self._thread.start()

    def append(self, kind: int, payload: bytes) -> asyncio.Future[Place]:
        """Log one record; the future completes when it is on disk.

        Raises UnavailableError, here or from the future, if it cannot be written.
        """
        if self._closed:
            raise UnavailableError("the collector is stopping: send it again")
        if self.waiting_bytes > MAX_WAITING_BYTES:
            raise UnavailableError(f"{self.waiting_bytes >> 20} MiB wait for the disk already: send it again later")
        future: asyncio.Future[Place] = self._loop.create_future()
        self.waiting_bytes += len(payload)
        if not self._turn:
            self._loop.call_soon(self._hand_over)
        self._turn.append((kind, payload, future))
        return future

    @property
    def directory(self) -> Path:
        """Folder of the log's files."""
        return self._log.directory

    def rotate(self) -> asyncio.Future[int]:
        """Start a new segment after everything appended so far; the future returns its first position.

        All earlier records have been delivered by then. Raises UnavailableError, here or from the future.
        """
        if self._closed:
            raise UnavailableError("the collector is stopping: ask again")
        return self._do(self._log.rotate)

    def release(self, position: int) -> asyncio.Future[None]:
        """Delete segments of which every record lies before `position`. The future completes once they are; it may raise OSError."""
        return self._do(functools.partial(self._log.release, position))

    async def close(self) -> None:
        """Write the waiting records and end the thread."""
        self._closed = True
        if self._next_try is not None:
            self._next_try.cancel()
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)

    def _run(self) -> None:
        closing = False
        while not closing:
            group: list[_Item] = []
            item = self._queue.get()
            while True:
                if item is None:
                    closing = True
                elif isinstance(item, list):
                    group += item
                else:
                    self._commit(group)
                    group = []
                    self._work(*item)
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            self._commit(group)

    def _hand_over(self) -> None:
        if self._turn:
            self._queue.put(self._turn)
            self._turn = []

    def _do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._hand_over()
        self._queue.put((work, future))
        return future

    def _work(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result, error = work(), None
        except (UnavailableError, OSError) as raised:
            result, error = None, raised
        self._loop.call_soon_threadsafe(self._worked, future, result, error, self._log.bytes_held)

    def _worked(self, future: asyncio.Future[Any], result: Any, error: Exception | None, bytes_held: int) -> None:
        self.bytes_held = bytes_held
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _commit(self, group: list[_Item]) -> None:
        if not group:
            return
        try:
            places = self._log.append([(kind, payload) for kind, payload, _ in group])
        except UnavailableError as error:
            self._loop.call_soon_threadsafe(self._failed, group, error)
            return
        self._loop.call_soon_threadsafe(self._done, group, places, self._log.bytes_held)

    def _done(self, group: list[_Item], places: list[Place], bytes_held: int) -> None:
        self.groups += 1
        self.trouble = ""
        self.bytes_held = bytes_held
        for (_, payload, future), place in zip(group, places, strict=True):
            self.waiting_bytes -= len(payload)
            if not future.cancelled():
                future.set_result(place)

    def _failed(self, group: list[_Item], error: UnavailableError) -> None:
        self._refused_bytes = sum(len(payload) for _, payload, _ in group)
        self._in_trouble(error)
        for _, payload, future in group:
            self.waiting_bytes -= len(payload)
            if not future.cancelled():
                future.set_exception(UnavailableError(str(error)))

    def _in_trouble(self, error: BaseException) -> None:
        self.trouble = str(error)
        if self._next_try is None and not self._closed:
            self._next_try = self._loop.call_later(TRY_SECONDS, self._try)

    def _try(self) -> None:
        self._next_try = None
        if self.trouble:
            self._do(functools.partial(self._log.try_disk, self._refused_bytes)).add_done_callback(self._tried)

    def _tried(self, future: asyncio.Future[None]) -> None:
        if (error := future.exception()) is None:
            self.trouble = ""
        else:
            self._in_trouble(error)
