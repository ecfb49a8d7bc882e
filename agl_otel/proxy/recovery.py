"""Recover the journals of dead proxies on this disk: send their spans, seal their attempts, and report the counts on close.

A journal whose lock is free belongs to a dead process. Its spans are sent unchanged; spans that the collector already has are
deduplicated on read. Then a last seal for each attempt states how many spans its process had begun. A call with a START but no END was in
flight when the proxy died: it counts but is not stored, and so makes its attempt incomplete. If records may be missing (`lossy`, damage,
or a reboot, as nothing was synced), the seals of attempts that were not closed report a dropped span.

Nothing is sent of rollouts that the queue no longer knows (deleted), or from before the retention limit.

Each journal is recovered independently: one that cannot be sent delays its own attempts only. After a damaged journal was sent it is kept
(*.damaged) until the end of the retention, or until the next deletion, because its unreadable part may belong to the deleted rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from agl_otel.errors import AglError, DataError, UnavailableError
from agl_otel.proxy.journal import (
    CLOSED,
    END,
    HEAD,
    LOCK,
    LOSSY,
    SETTLED,
    START,
    WHOLE,
    boot_id,
    clear,
    segments_of,
    unpacked,
    without,
)
from agl_otel.service.framed import DAMAGED, Frame, read
from agl_otel.service.lock import FileLock
from agl_otel.service.retry import Backoff
from agl_otel_hook import conventions
from agl_otel_hook.context import Key
from agl_otel_hook.ids import span_id
from agl_otel_hook.ledger import Count, Place
from agl_otel_hook.wire import field_of, of_parts, span_bytes

MAX_ATTEMPTS: Final = 100_000  # attempts whose counts are kept until they are closed
REQUEST_BYTES: Final = 3 << 20  # receivers with gRPC's default limit take 4 MiB
AGAIN: Final = Backoff(0.5, 10.0)
SENT_AT_ONCE: Final = 2  # journals sent concurrently
YOUNG_SECONDS: Final = 60.0  # a younger folder without a journal may be under construction
_RECORD: Final = (str, str, str, str, str, int, int, str)
_HEADS: Final = {HEAD: (str, int), SETTLED: (str,)}
"""Field types of the heads of records (journal.py)."""
_logger = logging.getLogger("agl_otel.proxy")
Send = Callable[[bytes], bool]
"""Exports a serialised request in the calling thread; returns whether it was acknowledged."""
Known = Callable[[Sequence[str]], Awaitable[Collection[str]]]
"""Returns which of the given rollouts exist. Raises AglError."""


@dataclass(slots=True)
class DeadAttempt:
    """One attempt under the marker of a dead process."""

    place: Place
    spans: int = 0
    dropped: int = 0
    open: set[str] = field(default_factory=set[str])
    """Calls with a START but no END."""
    ended: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Spans of calls, by the call's span id, as `wire.of_parts` takes them."""
    closed: bool = False
    """Whether the attempt was closed and all of it stored."""


@dataclass(slots=True)
class DeadJournal:
    """A journal of a dead process."""

    folder: Path
    lock: FileLock | None
    """None if the journal is only read."""
    parts: tuple[bytes, bytes] = (b"", b"")
    attempts: dict[tuple[Key, str], DeadAttempt] = field(default_factory=dict[tuple[Key, str], DeadAttempt])
    held: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    """{a call's span id: `ended` of its attempt}."""
    gaps: bool = False
    """Whether records may be missing."""
    damaged: bool = False
    """Whether part of the journal is unreadable."""
    files: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the files are changed."""

    def release(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.close()

    def count(self, name: tuple[Key, str]) -> Count:
        """The count in the last seal of an attempt."""
        attempt = self.attempts[name]
        gaps = self.gaps and not attempt.closed
        return Count(name[1], attempt.spans + len(attempt.open), max(attempt.dropped, int(gaps)))

    def requests(self) -> Iterator[bytes]:
        """The export requests, spans before seals."""
        unfinished = {name: attempt for name, attempt in self.attempts.items() if not attempt.closed}
        fields = [data for attempt in unfinished.values() for data in attempt.ended.values()]
        fields += [_seal(name[0], self.count(name), attempt.place) for name, attempt in unfinished.items()]
        batch: list[bytes] = []
        for data in fields:
            if batch and sum(map(len, batch)) + len(data) > REQUEST_BYTES:
                yield of_parts(*self.parts, b"".join(batch))
                batch = []
            batch.append(data)
        if batch:
            yield of_parts(*self.parts, b"".join(batch))


class JournalRecovery:
    """Finds journals below `root` and recovers them. `start` it in a running loop; `stop` it.

    Args:
        root: the folder of all journals of a disk.
        send: exports to the collector.
        known: asks the queue which rollouts exist.
        oldest: the retention limit (Unix seconds); older journals are removed.
    """

    def __init__(self, root: Path, send: Send, known: Known, *, oldest: float = 0.0) -> None:
        self._root = root
        self._send = send
        self._known = known
        self._oldest = oldest
        self._journals: list[DeadJournal] = []
        self._counts: dict[Key, dict[str, Count]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._sending = asyncio.Semaphore(SENT_AT_ONCE)
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Read all journals and start sending them."""
        self._journals = await asyncio.to_thread(self._find)
        for journal in self._journals:
            for name in journal.attempts:
                self._counts.setdefault(name[0], {})[name[1]] = journal.count(name)
        while len(self._counts) > MAX_ATTEMPTS:
            del self._counts[next(iter(self._counts))]
        self._tasks = [asyncio.create_task(self._run(journal), name="recovery") for journal in self._journals]

    async def stop(self) -> None:
        """Stop; journals not sent yet are left to the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for journal in self._journals:
            journal.release()

    async def counts(self, keys: Sequence[Key], *, timeout_seconds: float) -> list[list[Count] | None]:
        """Return the counts of dead processes for each attempt once all its spans are acknowledged; None for an attempt that timed out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._unsent().isdisjoint(keys):
                    self._changed.clear()
                    await self._changed.wait()
        unsent = self._unsent()
        return [None if key in unsent else list(self._counts.get(key, {}).values()) for key in keys]

    def _unsent(self) -> set[Key]:
        return {name[0] for journal in self._journals for name in journal.attempts}

    async def forget(self, rollout_ids: Collection[str]) -> None:
        """Delete these rollouts from the files and from what is to be sent. Raises UnavailableError."""
        gone = set(rollout_ids)
        for journal in self._journals:
            for name in [name for name in journal.attempts if name[0][0] in gone]:
                del journal.attempts[name]
        self._changed.set()
        try:
            for journal in list(self._journals):
                async with journal.files:
                    for path in segments_of(journal.folder):
                        await asyncio.to_thread(without, path, gone)
            for folder in self._root.glob(f"*{DAMAGED}"):
                await asyncio.to_thread(clear, folder)
        except OSError as error:
            raise UnavailableError(f"a dead proxy's journal in {self._root} cannot be written: {error.strerror or error}") from None

    def _find(self) -> list[DeadJournal]:
        found: list[DeadJournal] = []
        for folder in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            try:
                journal = self._open(folder)
            except (BlockingIOError, FileNotFoundError):  # in use by another process, or just removed
                continue
            except OSError as error:
                _logger.error("a dead proxy's journal in %s cannot be read: %s", folder, error.strerror or error)
                continue
            if journal is not None:
                found.append(journal)
        return found

    def _open(self, folder: Path) -> DeadJournal | None:
        """Lock and read the journal in a folder; None if there is none, or nothing to send. Raises OSError."""
        if not (folder / LOCK).exists():
            return None
        lock, journal = FileLock.take(folder / LOCK), None
        try:
            journal = self._read(folder, lock)
        finally:
            if journal is None:
                lock.close()
        return journal

    def _read(self, folder: Path, lock: FileLock) -> DeadJournal | None:
        paths = segments_of(folder)
        newest = max((path.stat().st_mtime for path in paths), default=(folder / LOCK).stat().st_mtime)
        if (not paths and newest < time.time() - YOUNG_SECONDS) or (paths and newest < self._oldest):
            clear(folder)
        if not paths or newest < self._oldest or folder.suffix == DAMAGED:
            return None
        journal = read_journal(folder, lock)
        if journal.damaged:
            _logger.error(
                "the journal %s of a proxy that died is damaged: its open attempts count as incomplete. It is kept in %s",
                folder,
                _damaged_folder(folder),
            )
        return journal

    async def _run(self, journal: DeadJournal) -> None:
        failures = 0
        while not await self._recover(journal):
            failures += 1
            await asyncio.sleep(AGAIN.jittered(failures))

    async def _recover(self, journal: DeadJournal) -> bool:
        ids = sorted({name[0][0] for name in journal.attempts})
        try:
            self.drop_unknown(journal, await self._known(ids))
        except AglError as error:
            _logger.warning("the journal of a dead proxy waits for the queue: %s", error)
            return False
        attempts = len(journal.attempts)
        for request in list(journal.requests()):
            async with self._sending:
                if len(journal.attempts) < attempts or not await asyncio.to_thread(self._send, request):
                    return False  # a rollout was deleted meanwhile, or the export failed
        _logger.info("sent the journal of a dead proxy, with %d attempts", attempts)
        async with journal.files:
            try:
                await asyncio.to_thread(_remove, journal)
            except OSError as error:
                _logger.warning("a dead proxy's journal cannot be removed from %s: %s", journal.folder, error.strerror or error)
            self._journals.remove(journal)
            journal.release()
        self._changed.set()
        return True

    @staticmethod
    def drop_unknown(journal: DeadJournal, known: Collection[str]) -> None:
        """Drop deleted rollouts."""
        for name in [name for name in journal.attempts if name[0][0] not in known]:
            del journal.attempts[name]


def read_journal(folder: Path, lock: FileLock | None = None) -> DeadJournal:
    """Read a journal. Raises OSError."""
    journal = DeadJournal(folder, lock, gaps=(folder / LOSSY).exists() or not (folder / WHOLE).exists())
    paths = segments_of(folder)
    for path in paths:
        entries = read(path)
        for place, entry in enumerate(entries):
            if isinstance(entry, Frame):
                try:
                    _take(journal, entry)
                except (DataError, ValueError):
                    journal.gaps = journal.damaged = True
            elif path != paths[-1] or place < len(entries) - 1:
                journal.gaps = journal.damaged = True
            # else a torn last record: a call that was not forwarded, or one without an END
    return journal


def _take(journal: DeadJournal, frame: Frame) -> None:
    """Add a record to `journal`. Raises DataError, ValueError."""
    head, data = unpacked(frame.payload)
    if tuple(map(type, head)) != _HEADS.get(frame.kind, _RECORD):
        raise DataError("a record of a proxy's journal has a head of another kind")
    if frame.kind == HEAD:
        journal.parts = (data[: head[1]], data[head[1] :])
        journal.gaps |= head[0] != boot_id()
        return
    if frame.kind == SETTLED:
        for at in range(0, len(data), 8):
            call = data[at : at + 8].hex()
            journal.held.pop(call, {}).pop(call, None)
        return
    rollout_id, attempt_id, marker, trace_id, parent_id, spans, dropped, span_id = head
    place = bytes.fromhex(trace_id), bytes.fromhex(parent_id)
    if (len(place[0]), len(place[1])) != (16, 8):
        raise DataError("a record of a proxy's journal has ids of another length")
    name = ((rollout_id, attempt_id), marker)
    attempt = journal.attempts.get(name)
    if attempt is None:
        attempt = journal.attempts[name] = DeadAttempt((int.from_bytes(place[0]), int.from_bytes(place[1])))
    attempt.spans, attempt.dropped = max(attempt.spans, spans), max(attempt.dropped, dropped)
    attempt.closed = frame.kind == CLOSED
    if frame.kind == START:
        attempt.open.add(span_id)
    elif frame.kind == END:
        attempt.open.discard(span_id)
        attempt.ended[span_id] = data
        journal.held[span_id] = attempt.ended


def _remove(journal: DeadJournal) -> None:
    """Remove a journal that was sent; rename it if it is damaged. Raises OSError."""
    if journal.damaged:
        journal.folder.rename(_damaged_folder(journal.folder))
    else:
        clear(journal.folder)


def _damaged_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + DAMAGED)


def _seal(key: Key, count: Count, place: Place) -> bytes:
    ids = {conventions.ROLLOUT_ID: key[0], conventions.PROCESS: count.marker, **({conventions.ATTEMPT_ID: key[1]} if key[1] else {})}
    sealed = {conventions.SEAL_SPANS: count.spans, conventions.SEAL_DROPPED: count.dropped, conventions.SEAL_CLOSING: True}
    context = SpanContext(place[0], span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    parent = SpanContext(place[0], place[1], is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    now = time.time_ns()
    return field_of(
        span_bytes(ReadableSpan(conventions.SPAN_SEAL, context, parent, attributes={**ids, **sealed}, start_time=now, end_time=now))
    )
