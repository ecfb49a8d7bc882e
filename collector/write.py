"""The writer: takes the requests waiting in the log as one batch, numbers and notes it, inserts it, and releases its waiters.

Batches are small under low load and grow with the load, because every insert has a fixed cost; two are inserted at a time, if two are full.
Numbers come from the queue; while it is unavailable, spans stay in the log and nothing acked is lost. Batches are numbered, noted and
released in log order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from agl_otel.collector import faults
from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.journal import (
    BATCH,
    SETTLED,
    STORED,
    Batch,
    Member,
    RecoveryState,
    Request,
    number_requests,
    pack_batch,
    pack_settled,
    pack_stored,
    unpack_request,
    without_stored,
)
from agl_otel.collector.recovery import Recovery
from agl_otel.collector.resends import ResendJournal
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.telemetry import Stopwatch
from agl_otel.collector.wal import Place
from agl_otel.errors import DataError, DiskFullError, UnavailableError
from agl_otel.service.retry import Backoff
from agl_otel.traces.engine import ClickHouseError

LANES: Final = 2  # inserts at a time: one is being built while ClickHouse writes the other
MAX_BATCH_ROWS: Final = 60_000
MAX_BATCH_BYTES: Final = 112 << 20
MAX_BATCH_EXPANDED: Final = 256 << 20  # bytes of rows (expansion.py); a larger request is a batch of its own
MAX_HELD_BYTES: Final = 128 << 20  # of waiting requests kept in memory; beyond it they are read back from the log
GATHER_SECONDS: Final = 0.02  # from the first row to the insert: related spans arrive together, and a starting agent needs the CPU
BATCHING_DELAY_SECONDS: Final = (
    0.25  # between the begins of two inserts while no client waits: each costs 20 to 50 ms of CPU, however few its rows
)
PATIENCE_SECONDS: Final = 0.5  # between the begins of two inserts while the one before has not ended: a merge may slow it down
BACKOFF: Final = Backoff(0.1, 5.0)
PATIENCE_WITHOUT_STORE_SECONDS: Final = 55.0
"""How long a client waits for its data to be stored while nothing can be: our own clients wait 60 s for an answer."""
LOOK_SECONDS: Final = 0.25  # between two looks whether anything can be stored
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Numbers(Protocol):
    """What the writer needs of the queue."""

    async def take_sequence(self, requests: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return the first numbers for each (rollout id, count, at least). Raises UnavailableError while the queue is unavailable."""
        ...


class _Waiting(NamedTuple):
    position: int
    place: Place | None
    request: Request | None  # None: it must be read back from the log
    size: int
    rows: int
    expanded: int


@dataclass(eq=False)
class _Insert:
    """A batch that is being inserted, or a gap in the log."""

    last: int
    """Log position of its last request."""
    rows: int = 0
    done: bool = False


class Writer:
    """Writes the log's requests to the store. Start it with `run()` as a task; `add` must be called in log order."""

    def __init__(
        self,
        store: BatchStore,
        commit: GroupCommit,
        numbers: Numbers,
        recovery_state: RecoveryState,
        read: Callable[[Place], bytes],
        resends: ResendJournal,
        *,
        on_stored: Callable[[int, float, float], None] | None = None,
        away: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._recovery = Recovery(store, commit.directory)
        self._commit = commit
        self._numbers = numbers
        self._read = read
        self._resends = resends
        self._on_stored = on_stored  # see Telemetry.batch_stored
        self._away = away  # why ClickHouse does not answer, as soon as that is known; an insert may notice it much later
        self._in_doubt = recovery_state.in_doubt
        self._batch_id = recovery_state.batch_id
        self._waiting: deque[_Waiting] = deque()
        self._held = 0  # bytes of waiting requests in memory
        self._rows = self._bytes = self._expanded = 0  # of waiting requests
        self._last_batch_at = float("-inf")
        self._wake = asyncio.Event()  # a request waits
        self._write_now = asyncio.Event()  # do not linger: somebody waits for the insert, or a batch is full
        self._again = asyncio.Event()  # repeat a failed try now, without the rest of its pause
        self._closing = asyncio.Event()
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="writer")
        self._noting = asyncio.Lock()  # of the journal of resends
        self._inserts: deque[_Insert] = deque()  # in log order
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self.accepted = -1
        """Log position of the last request that was acked."""
        self.lost: set[int] = set()
        """Log positions of requests that were damaged in the log before they could be written."""
        self.stored = -1
        """Every request up to this log position is visible to queries, or lost."""
        self.batches = 0
        self._full = False
        self.trouble = ""
        """Why nothing is being written; empty if there is no problem."""
        for position, request in recovery_state.unwritten:
            self._push(_Waiting(position, None, request, len(request.raw), request.rows, request.expanded))
        if self._in_doubt:
            batch, members = self._in_doubt[-1]
            self.accepted = max(self.accepted, members[-1][0] if batch is None else batch.last)
        if not self._in_doubt and not self._waiting:
            self.stored = self.accepted

    @property
    def idle(self) -> bool:
        """Whether all that was acked is stored."""
        return not self._waiting and self.stored >= self.accepted

    @property
    def backlog(self) -> int:
        """Number of rows in the log that are not stored yet."""
        return self._rows + sum(insert.rows for insert in self._inserts if not insert.done)

    def add(self, place: Place, request: Request) -> None:
        """Add a request that is on disk in the log."""
        held = request if self._held < MAX_HELD_BYTES else None
        self._push(_Waiting(place.position, place, held, place.length, request.rows, request.expanded))

    def _push(self, item: _Waiting) -> None:
        self._waiting.append(item)
        self._held += item.size if item.request is not None else 0
        self._rows += item.rows
        self._bytes += item.size
        self._expanded += item.expanded
        if self._is_full():
            self._write_now.set()
        self.accepted = max(self.accepted, item.position)
        self._wake.set()

    async def wait(self, position: int, patience_seconds: float = PATIENCE_WITHOUT_STORE_SECONDS) -> None:
        """Return when every request up to `position` is visible to queries, or lost.

        Raises UnavailableError if the collector stops before, if a disk is full at the next try (nobody knows until when), or if ClickHouse
        or the queue are unavailable for `patience_seconds`. A store that is slow is waited for.
        """
        if position <= self.stored:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((position, future))
        self._write_now.set()
        if self._full:
            self._again.set()
        try:
            await self._while_storing(future, patience_seconds)
        finally:
            future.cancel()  # if nobody waits for it any more
        future.result()

    async def _while_storing(self, future: asyncio.Future[None], patience_seconds: float) -> None:
        """Return when `future` is done. Raises UnavailableError if nothing can be stored for `patience_seconds`."""
        able_at = time.monotonic()
        while not (await asyncio.wait({future}, timeout=LOOK_SECONDS))[0]:
            why = self.trouble or self._away()
            now = time.monotonic()
            if not why:
                able_at = now
            elif now - able_at >= patience_seconds:
                raise UnavailableError(f"it is in the collector's log and not stored yet: {why}")

    async def barrier(self, patience_seconds: float = PATIENCE_WITHOUT_STORE_SECONDS) -> int:
        """Wait until everything acked before the call is visible; return the log position waited for. Raises as `wait` does."""
        position = self.accepted
        await self.wait(position, patience_seconds)
        return position

    async def forget(self, rollout_ids: Collection[str]) -> None:
        """Delete dead letters that contain, or may contain, data of these rollouts (dead_letters.py). Raises OSError."""
        await asyncio.to_thread(self._store.forget_dead_letters, self._commit.directory, rollout_ids)

    async def purge(self) -> None:
        """Return when no file of the log contains data acked before the call.

        A crash in between loses nothing: as after any batch, segments are deleted oldest first, and only if everything in them is stored.
        Raises UnavailableError, OSError; the call may then be repeated.
        """
        position = await self._commit.rotate()
        await self.barrier()  # everything before `position` has been added: records are delivered in order
        await self._commit.release(position)

    async def expire(self, before: float) -> int:
        """Remove stored data from the log, and dead letters written before a time (Unix seconds); return the number of dead letter files.

        Raises UnavailableError, OSError; the call may then be repeated.
        """
        await self.purge()
        return await asyncio.to_thread(self._store.expire_dead_letters, self._commit.directory, before)

    async def run(self) -> None:
        """Write until `close`."""
        try:
            for batch, members in self._in_doubt:
                if batch is None:
                    await self._settle(members)
                    continue
                _logger.warning(
                    "recovery: batch %d (%d requests) is in doubt; asking ClickHouse what is stored", batch.batch_id, len(members)
                )
                await self._insert(batch, members, in_doubt=True)
                self._is_stored(batch.last)
            while await self._write_some():
                pass
            await self._all_inserted()
        except _StoppedError:
            _logger.warning("stopping with %d rows that are in the log only; they are written at the next start", self.backlog)
        finally:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._refuse_waiters("the collector stopped before this was stored; it is in the log")
            self._threads.shutdown(wait=True)

    def close(self) -> None:
        """Write the waiting requests and end; what cannot be written at once stays in the log."""
        self._closing.set()
        self._wake.set()
        self._write_now.set()
        self._again.set()

    async def _settle(self, members: Sequence[Member]) -> None:
        """Insert the rows that are not stored, of requests that a lost batch may have contained."""
        for some in _in_batches(members):
            found = await self._retry_until_done("ClickHouse", lambda some=some: self._in_thread(lambda: self._store.find(some)))
            _logger.warning(
                "recovery: the log has lost which batch took %d requests; of their %d rows %d are stored",
                len(some),
                sum(request.rows for _, request in some),
                sum(map(len, found.values())),
            )
            await self._retry_until_done("the write-ahead log", lambda found=found: self._commit.append(SETTLED, pack_settled(found)))
            left = [(position, without_stored(request, found[position])) for position, request in some]
            if any(request.rows for _, request in left):
                await self._insert(await self._note(left), left, in_doubt=False)
            else:
                await self._remember(left)
            self._is_stored(some[-1][0])

    async def _note(self, members: Sequence[Member]) -> Batch:
        """Number these requests, and note them as a batch."""
        numbers = await self._number(members)
        batch = Batch(self._next_batch_id(), members[0][0], members[-1][0], numbers)
        await self._retry_until_done("the write-ahead log", lambda: self._commit.append(BATCH, pack_batch(batch)))
        faults.failpoint("batch-noted")
        return batch

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _write_some(self) -> bool:
        """Begin to insert waiting requests, up to one batch; return False at the end."""
        while not self._waiting:
            if self._closing.is_set():
                return False
            self._wake.clear()
            await self._wake.wait()
        await self._wait_for_more()
        members: list[Member] = []
        room = _Room()
        insert = _Insert(-1)
        while self._waiting and room.takes(self._waiting[0].rows, self._waiting[0].size, self._waiting[0].expanded):
            item = self._waiting.popleft()
            insert.last = item.position
            insert.rows += item.rows
            self._rows -= item.rows
            self._bytes -= item.size
            self._expanded -= item.expanded
            if item.request is not None:
                self._held -= item.size
            request = item.request or await self._read_back(item)
            if request is None:  # a batch must not span it: a later start that can read the request would take it for part of the batch
                break
            members.append((item.position, request))
        self._inserts.append(insert)
        if not members:
            self._inserted(insert)
            return True
        batch = await self._note(members)
        task = asyncio.create_task(self._insert(batch, members, in_doubt=False))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._task_done, insert))
        return True

    def _task_done(self, insert: _Insert, task: asyncio.Task[None]) -> None:
        self._write_now.set()  # a lane is free
        if not task.cancelled() and task.exception() is None:
            self._tasks.discard(task)
            self._inserted(insert)

    def _inserted(self, insert: _Insert) -> None:
        """Record that a batch is stored: its requests are once all before them are."""
        insert.done = True
        while self._inserts and self._inserts[0].done:
            self._is_stored(self._inserts.popleft().last)

    async def _all_inserted(self) -> None:
        """Wait for the inserts that have begun. Raises what one of them raised."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _read_back(self, item: _Waiting) -> Request | None:
        """Read a request from the log; None if it is damaged."""
        place = item.place
        assert place is not None  # a request without a place is in memory
        try:
            payload = await self._retry_until_done("the write-ahead log", lambda: self._in_thread(lambda: self._read(place)))
        except DataError:
            self.lost.add(item.position)
            return None
        return unpack_request(payload)

    async def _wait_for_more(self) -> None:
        """Wait for a free lane, and for more rows unless somebody waits for the insert or a batch is full.

        While one batch is being inserted, another begins if it is full, somebody waits, or PATIENCE_SECONDS have passed: larger batches
        cost less.
        """
        now = time.monotonic()
        until = max(now + GATHER_SECONDS, self._last_batch_at + BATCHING_DELAY_SECONDS)
        while True:
            for task in [task for task in self._tasks if task.done()]:
                task.result()
            hurried = bool(self._waiters) or self._closing.is_set() or self._is_full()
            rest = (self._last_batch_at + PATIENCE_SECONDS if self._tasks else until) - time.monotonic()
            if len(self._tasks) < LANES and (hurried or rest <= 0):
                break
            self._write_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest if len(self._tasks) < LANES else None):
                    await self._write_now.wait()
        self._last_batch_at = time.monotonic()

    def _is_full(self) -> bool:
        """Return whether a whole batch is waiting."""
        return self._rows >= MAX_BATCH_ROWS or self._bytes >= MAX_BATCH_BYTES or self._expanded >= MAX_BATCH_EXPANDED

    async def _number(self, members: Sequence[Member]) -> dict[str, int]:
        requested = number_requests(request for _, request in members)
        if not requested:
            return {}
        first = await self._retry_until_done("the queue", lambda: self._numbers.take_sequence(requested))
        return {rollout_id: number for (rollout_id, count, _), number in zip(requested, first, strict=True) if count}

    async def _insert(self, batch: Batch, members: Sequence[Member], *, in_doubt: bool) -> None:
        doubt = recovering = in_doubt
        watch = Stopwatch()

        async def attempt() -> None:
            nonlocal doubt, watch
            watch = Stopwatch()
            before, doubt = doubt, True  # whatever this try does, the next one checks what is stored
            if recovering:
                await self._in_thread(lambda: self._recovery.store(batch, members))
            else:
                await self._in_thread(lambda: self._store.store(batch, members, in_doubt=before))

        await self._retry_until_done("ClickHouse", attempt)
        if self._on_stored is not None:
            self._on_stored(members[0][1].received_ms, watch.began_at, watch.seconds)
        await self._remember(members)
        self._commit.append(STORED, pack_stored(batch)).add_done_callback(_look_at)  # recovery works without this record
        faults.failpoint("stored-noted")
        self.batches += 1

    async def _remember(self, members: Sequence[Member]) -> None:
        """Write the responses to these requests to the journal of resends: the log may delete the requests afterwards."""
        requests = [request for _, request in members]
        async with self._noting:
            await self._retry_until_done("the journal of resends", lambda: self._in_thread(lambda: self._resends.add(requests)))

    def _is_stored(self, position: int) -> None:
        """Record that all requests up to this log position are stored or lost: release their segments and their waiters."""
        if position <= self.stored:
            return
        self._commit.release(position + 1).add_done_callback(_look_at)  # after an error the next batch releases them, too
        self.stored = max(self.stored, position)
        still: list[tuple[int, asyncio.Future[None]]] = []
        for position, future in self._waiters:
            if position > self.stored:
                still.append((position, future))
            elif not future.done():
                future.set_result(None)
        self._waiters = still

    def _refuse_waiters(self, why: str) -> None:
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(UnavailableError(why))
        self._waiters.clear()

    async def _retry_until_done(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry in order, without limit, while `what` is unavailable; only stopping the service ends it."""
        failures = 0
        while True:
            try:
                result = await attempt()
            except (UnavailableError, ClickHouseError) as error:
                self.trouble = f"{what} does not take a batch: {error}"
                self._full = isinstance(error, DiskFullError) or bool(self._commit.trouble)
                if self._full:
                    self._refuse_waiters(self.trouble)
                if self._closing.is_set():
                    raise _StoppedError from None
                failures += 1
                if failures in (1, 11) or failures % 100 == 1:
                    _logger.warning("%s does not take a batch (%d rows wait in the log); trying again: %s", what, self.backlog, error)
                self._again.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BACKOFF.jittered(failures)):
                        await self._again.wait()
                continue
            self.trouble, self._full = "", False
            if failures:
                _logger.warning("%s is back after %d tries", what, failures)
            return result

    def _next_batch_id(self) -> int:
        """Return an id that is time-ordered and unique across collectors: 42 bits of milliseconds, 22 random bits."""
        self._batch_id = max(self._batch_id + 1, (time.time_ns() // 1_000_000) << 22 | random.getrandbits(22))
        return self._batch_id


class _Room:
    """Capacity of a batch: any first request, and more requests while all together stay within the limits."""

    def __init__(self) -> None:
        self._held = (0, 0, 0)

    def takes(self, rows: int, size: int, expanded: int) -> bool:
        held = (self._held[0] + rows, self._held[1] + size, self._held[2] + expanded)
        if any(self._held) and (held[0] > MAX_BATCH_ROWS or held[1] > MAX_BATCH_BYTES or held[2] > MAX_BATCH_EXPANDED):
            return False
        self._held = held
        return True


def _in_batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    some: list[Member] = []
    room = _Room()
    for position, request in members:
        size = request.rows, len(request.raw), request.expanded
        if not room.takes(*size):
            yield some
            some, room = [], _Room()
            room.takes(*size)
        some.append((position, request))
    yield some


def _look_at(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()):
        _logger.warning("the write-ahead log: %s", error)


class _StoppedError(Exception):
    pass
