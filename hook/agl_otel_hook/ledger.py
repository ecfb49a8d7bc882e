"""Span counts of each attempt in this process: the numbers that seals carry.

Plain counting under one lock; makes no spans and reads no clock. A marker identifies one process (a fork gets a new one) and never counts
an attempt twice: once an attempt is forgotten, every attempt first seen after that gets a new marker.

Where the process has record files (records.py), the counts are written there, too: `begun` before the agent gets its span, `ended` when the
span has ended. An attempt without a record, e.g. because it has no folder, is announced instead.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from sys import is_finalizing
from typing import Final, NamedTuple

from agl_otel_hook import forks
from agl_otel_hook.context import Key
from agl_otel_hook.guard import note_failure
from agl_otel_hook.records import Records, Slot

MAX_ATTEMPTS: Final = 100_000
"""Limit on attempts, some 40 MB; beyond it the oldest idle one is forgotten, or the oldest if none is idle."""
MAX_ENDED: Final = 10_000
"""Limit on ended attempts that are remembered, some 3 MB; beyond it the oldest is forgotten."""
CHECKED_ATTEMPTS: Final = 4  # oldest attempts that are checked with each new one
Place = tuple[int, int]
"""(trace id, span id)."""


def new_marker() -> str:
    """Return a process marker: 16 random hex digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Count:
    """Counts of one attempt under one marker: spans ended, and how many of them the exporter dropped."""

    marker: str
    spans: int
    dropped: int
    open: int = 0
    """Spans begun and not ended."""


class Started(NamedTuple):
    """What a started span is marked with."""

    marker: str
    """Empty for a span of an attempt that `end_attempt` has ended: no count of this process has it."""
    late: bool
    """Whether the span began after the attempt had ended, or its ledger was read."""


@dataclass(slots=True)
class _Entry:
    marker: str
    place: Place
    spans: int = 0
    dropped: int = 0
    open: set[int] = field(default_factory=set[int])
    sealed: Count | None = None
    slot: Slot | None = None
    """Its slot in a record file, if any."""
    begun: int = 0
    """Like `ended` and `abandoned`, a number of the slot: without late spans."""
    ended: int = 0
    abandoned: int = 0
    given_up: set[int] = field(default_factory=set[int])
    """Spans that were open when the process closed: abandoned, unless they end after all."""
    late: set[int] = field(default_factory=set[int])
    """Open spans that began after the slot was read, or after the process closed for the last time."""

    def count(self) -> Count:
        """Return the numbers for a seal."""
        return Count(self.marker, self.spans, self.dropped, len(self.open))

    def close(self, ending: Set[int]) -> None:
        """Abandon the open spans and close the slot. Spans in `ending`, which may be exported or not, stay in flight."""
        if self.slot is not None:
            self.given_up |= self.open - self.late - ending
            self.record()
            self.slot.closed(closed=True)

    def record(self) -> None:
        """Write the slot."""
        if self.slot is not None:
            self.slot.write(self.begun, self.ended, self.abandoned + len(self.given_up), self.dropped)


class Ledger:
    """Span counts by attempt. Every method may be called from any thread.

    `records` makes the Records of this process, and again those of each fork of it (None: no records). `on_new` is called at each new
    attempt, and `on_unrecorded` with each that has no record.
    """

    def __init__(
        self,
        records: Callable[[], Records | None] | None = None,
        *,
        on_new: Callable[[], None] = lambda: None,
        on_unrecorded: Callable[[Key], None] | None = None,
    ) -> None:
        self._make_records = records
        self._on_new = on_new
        self._roots: list[str] = []
        self._on_unrecorded = on_unrecorded
        self._ended: dict[Key, None] = {}
        """Attempts that this process's runner has ended, the oldest first."""
        self._records: Records | None = None
        self._reset()
        forks.register(self.after_fork)

    def _reset(self, inherited: frozenset[int] = frozenset()) -> None:
        parents, self._records = self._records, None  # first: after a fork, its file is mapped by the parent, too
        self._inherited = inherited
        """Spans that were open when this process was forked: its parent's."""
        self._open: set[int] = set()
        """Open spans of all attempts."""
        self._exporting: set[int] = set()
        """Open spans that an exporter has taken: they have ended and are about to be counted."""
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._marker = new_marker()
        self._over = False
        """Whether the process has closed for the last time."""
        self._records = self._make_records() if self._make_records is not None else None
        for root in self._roots:
            self._record_below(root, is_own=False)
        if self._records is not None and parents is not None:
            self._records.forked_from(parents)

    def keep(self, root: str) -> None:
        """Record attempts of this process's own runner in their folders below `root`, in this process and in each fork of it."""
        with self._held():
            if root not in self._roots:
                self._roots.append(root)
                self._record_below(root, is_own=True)

    def _record_below(self, root: str, *, is_own: bool) -> None:
        if self._records is None:
            self._records = Records(root)
        self._records.add(root, is_own=is_own)

    def _held(self) -> AbstractContextManager[object]:
        """Return the lock for all access to the counts, after resetting them if this process is a fork made outside Python.

        At interpreter shutdown no lock is taken: a thread that holds it never runs again, and no other thread runs.
        """
        forks.notice()
        return self._lock if not is_finalizing() else nullcontext()

    def loaded(self, key: Key) -> None:
        """Record that the hook is loaded in this process, which was started for the attempt."""
        if self._records is not None:
            try:
                self._records.loaded(*key)
            except OSError as error:
                note_failure("the ledger", error)

    @property
    def marker(self) -> str:
        """The marker for attempts that are first seen from now on."""
        return self._marker

    def after_fork(self) -> None:
        """Reset in a child process: a new marker, no counts, a free lock."""
        self._reset(self._inherited | self._open)

    def started(self, key: Key, span_id: int, place: Place) -> Started:
        """Count a started span of the attempt and return what to mark it with. `place`: ids of its trace and parent (a root: its own)."""
        failed: OSError | None = None
        with self._held():
            if key in self._ended:
                return Started("", late=True)
            entry = self._entries.get(key)
            new = entry is None
            if entry is None:
                if len(self._entries) >= MAX_ATTEMPTS:
                    self._forget_one()
                self._forget_read()
                entry = self._entries[key] = _Entry(self._marker, place)
                try:
                    entry.slot = self._records.slot(*key, self._marker) if self._records is not None else None
                except OSError as error:
                    failed = error
            entry.open.add(span_id)
            self._open.add(span_id)
            slot, late = entry.slot, self._over and threading.get_ident() != threading.main_thread().ident
            if late:
                entry.late.add(span_id)
            elif slot is not None:
                entry.begun += 1
                if late := slot.begun(entry.begun):
                    entry.begun -= 1
                    slot.begun(entry.begun)
                    entry.late.add(span_id)
            started = Started(entry.marker, late)
        if failed is not None:
            note_failure("the ledger", failed)
        if new:
            self._on_new()
        if new and slot is None and self._on_unrecorded is not None:
            self._on_unrecorded(key)
        return started

    def close(self, ending: Set[int] = frozenset()) -> None:
        """Close all attempts at the end of the process: open spans are abandoned. Spans in `ending`, exported or not, stay in flight."""
        with self._held():
            for entry in self._entries.values():
                entry.close(self._exporting | ending)

    def close_for_good(self) -> None:
        """Close every attempt for the last time: spans that no exporter has taken are neither counted nor exported.

        Spans that other threads begin from now on are late. What the main thread begins, in a destructor at teardown, counts: it is lost.
        """
        with self._held():
            self._over = True
            for entry in self._entries.values():
                entry.close(self._exporting)

    def takes(self, span_id: int) -> bool:
        """Return whether an exporter is to take an ended span: it began after the fork, and the process has not closed for good."""
        with self._held():
            if span_id not in self._open:
                return span_id not in self._inherited
            if not self._over:
                self._exporting.add(span_id)
            return span_id in self._exporting

    def exporting(self) -> bool:
        """Return whether exporters have taken spans that are not counted yet."""
        with self._held():
            return bool(self._exporting)

    def end_attempt(self, key: Key) -> None:
        """Close one attempt, for which this process does nothing more: its open spans are abandoned, and those that begin now are late."""
        with self._held():
            while len(self._ended) >= MAX_ENDED:
                self._ended.pop(next(iter(self._ended)))
            self._ended[key] = None
            if (entry := self._entries.get(key)) is not None:
                entry.close(self._exporting)

    def reopen(self) -> None:
        """Undo `close`: the process goes on."""
        with self._held():
            for entry in self._entries.values():
                if entry.slot is not None:
                    entry.slot.closed(closed=False)
                    entry.given_up.clear()
                    entry.record()

    def ended(self, key: Key, span_id: int, *, marker: str | None) -> bool:
        """Count an ended span: as ended if it has the attempt's `marker`, as abandoned if not (None: it is not exported).

        Return whether it was the attempt's last open span. A span that began before the fork of this process is ignored.
        """
        with self._held():
            entry = self._entries.get(key)
            if entry is None or span_id not in entry.open:
                return False
            if self._over and span_id not in self._exporting:
                return False
            entry.open.discard(span_id)
            self._open.discard(span_id)
            self._exporting.discard(span_id)
            counts = marker == entry.marker
            entry.spans += counts
            if span_id in entry.late:
                entry.late.discard(span_id)
            elif entry.slot is not None:
                entry.ended += counts
                entry.abandoned += not counts
                if counts and not entry.given_up:
                    entry.slot.ended(entry.ended)
                else:
                    entry.given_up.discard(span_id)
                    entry.record()
            return not entry.open

    def dropped(self, key: Key, marker: str) -> None:
        """Count a span that was counted as ended and that the exporter has dropped."""
        with self._held():
            entry = self._entries.get(key)
            if entry is not None and entry.marker == marker:
                entry.dropped += 1
                entry.record()

    def count(self, key: Key) -> Count | None:
        """Return the attempt's counts; None where no span of it began in this process."""
        with self._held():
            entry = self._entries.get(key)
            return entry.count() if entry is not None else None

    def sealed(self, key: Key, count: Count) -> None:
        """Record that a seal with these counts was acknowledged."""
        with self._held():
            entry = self._entries.get(key)
            if entry is not None and entry.marker == count.marker:
                entry.sealed = count

    def is_sealed(self, key: Key, count: Count) -> bool:
        """Return whether the last acknowledged seal has these counts."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and entry.sealed == count

    def unsealed(self) -> list[Key]:
        """Return attempts without open spans whose counts have changed since their last acknowledged seal."""
        with self._held():
            return [key for key, entry in self._entries.items() if not entry.open and entry.sealed != entry.count()]

    def unproven(self) -> list[Key]:
        """Return attempts without a record, and those with open spans whose counts no acknowledged seal has."""
        with self._held():
            return [key for key, entry in self._entries.items() if entry.slot is None or (entry.open and entry.sealed != entry.count())]

    def unrecorded(self) -> list[Key]:
        """Return attempts without a record."""
        with self._held():
            return [key for key, entry in self._entries.items() if entry.slot is None]

    def place(self, key: Key) -> Place | None:
        """Return the parent for spans about the whole attempt: that of the first span counted here; None where there is none."""
        with self._held():
            entry = self._entries.get(key)
            return entry.place if entry is not None else None

    def is_idle(self, key: Key) -> bool:
        """Return whether the attempt is known and has no open span."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and not entry.open

    def is_open(self, key: Key) -> bool:
        """Return whether the attempt has an open span."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and bool(entry.open)

    def forget(self, key: Key) -> None:
        """Drop the attempt's counts; if it comes back, it gets a marker that it never had."""
        with self._held():
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._freed(entry)

    def _forget_read(self) -> None:
        """Drop attempts that their runner has read and that have no open span: a pool's worker serves thousands of attempts.

        Checks the CHECKED_ATTEMPTS oldest, up to the first one that is not read. One with an open span, perhaps leaked, or without a slot
        is moved to the end, to be checked again later.
        """
        for key in list(islice(self._entries, CHECKED_ATTEMPTS)):
            entry = self._entries[key]
            if self._records is None or (entry.slot is not None and not entry.slot.is_read):
                break
            del self._entries[key]
            if entry.slot is None or entry.open:
                self._entries[key] = entry
            else:
                self._freed(entry)

    def _forget_one(self) -> None:
        """Drop the oldest attempt without open spans, else the oldest."""
        key = next((key for key, entry in self._entries.items() if not entry.open), next(iter(self._entries)))
        self._freed(self._entries.pop(key))

    def _freed(self, entry: _Entry) -> None:
        self._open -= entry.open
        self._exporting -= entry.open
        self._marker = new_marker()
        if entry.slot is not None:
            entry.slot.free()
