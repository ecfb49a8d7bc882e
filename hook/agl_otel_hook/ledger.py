"""How many spans each attempt has ended in this process: the numbers that seals carry.

Plain counting under one lock; no OpenTelemetry, no clock. A marker stands for one process (new after a fork) and never counts an
attempt twice: when an attempt is forgotten, every attempt that is new from then on gets a new marker.

Where the process has record files (records.py) the counts are in them, too: `begun` before a span is handed out, `ended` when it has
ended. What has no record, because there is no folder for it, is announced instead.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from agl_otel_hook import forks
from agl_otel_hook.context import Key
from agl_otel_hook.guard import note_failure
from agl_otel_hook.records import Records, Slot

MAX_ATTEMPTS: Final = 100_000
LOOKED_AT: Final = 4  # of the oldest attempts, with each new one
"""More than these, and the idle one seen first is forgotten: some 40 MB."""
Place = tuple[int, int]
"""(trace id, span id)."""


def new_marker() -> str:
    """A process marker: 16 random hex digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Count:
    """What one attempt has ended so far under one marker."""

    marker: str
    spans: int
    dropped: int
    open: int = 0
    """How many spans it has begun besides."""


class Started(NamedTuple):
    """What a span carries that has started."""

    marker: str
    late: bool
    """It began after the attempt's ledger was read."""


@dataclass(slots=True)
class _Entry:
    marker: str
    place: Place
    spans: int = 0
    dropped: int = 0
    open: set[int] = field(default_factory=set[int])
    sealed: Count | None = None
    slot: Slot | None = None
    """Where it is recorded, too; None: nowhere."""
    begun: int = 0
    """The numbers of the slot: without the spans that are late."""
    ended: int = 0
    abandoned: int = 0
    given_up: set[int] = field(default_factory=set[int])
    """Spans that were open when the process closed: abandoned, unless they end after all."""
    late: set[int] = field(default_factory=set[int])
    """Open spans that began after the slot was read."""

    def count(self) -> Count:
        """The numbers of a seal."""
        return Count(self.marker, self.spans, self.dropped, len(self.open))

    def close(self, ending: Set[int] = frozenset()) -> None:
        """What is open now will not be exported. Spans that are `ending` may be or not: they stay in flight."""
        if self.slot is not None:
            self.given_up |= self.open - self.late - ending
            self.record()
            self.slot.closed(closed=True)

    def record(self) -> None:
        """Write the slot."""
        if self.slot is not None:
            self.slot.write(self.begun, self.ended, self.abandoned + len(self.given_up), self.dropped)


class Ledger:
    """Counts by attempt. Every method may be called from any thread.

    `records` makes the process's record files, in this process and again in each fork of it (None: it keeps none). `on_unrecorded` is
    called with an attempt that begins without a record.
    """

    def __init__(self, records: Callable[[], Records | None] | None = None, *, on_unrecorded: Callable[[Key], None] | None = None) -> None:
        self._make_records = records
        self._roots: list[str] = []
        self._on_unrecorded = on_unrecorded
        self._records: Records | None = None
        self._reset()
        forks.register(self.after_fork)

    def _reset(self, foreign: frozenset[str] = frozenset()) -> None:
        parents, self._records = self._records, None  # before anything else: after a fork it is mapped by the parent, too
        self._foreign = foreign
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._marker = new_marker()
        self._records = self._make_records() if self._make_records is not None else None
        for root in self._roots:
            self._record_below(root, is_own=False)
        if self._records is not None and parents is not None:
            self._records.forked_from(parents)

    def keep(self, root: str) -> None:
        """Record the attempts of this process's own runner, whose folders are below `root`, here and in each fork of this process."""
        with self._held():
            if root not in self._roots:
                self._roots.append(root)
                self._record_below(root, is_own=True)

    def _record_below(self, root: str, *, is_own: bool) -> None:
        if self._records is None:
            self._records = Records(root)
        self._records.add(root, is_own=is_own)

    def _held(self) -> AbstractContextManager[object]:
        """The lock, for every look at the counts: those of a process that this one is a fork of are left alone, however it was forked.

        A thread that holds it when the interpreter is torn down never runs again, and no other one does.
        """
        forks.notice()
        return self._lock if not sys.is_finalizing() else nullcontext()

    def loaded(self, key: Key) -> None:
        """Write down that the hook is loaded in this process, which was started for the attempt."""
        if self._records is not None:
            try:
                self._records.loaded(*key)
            except OSError as error:
                note_failure("the ledger", error)

    @property
    def marker(self) -> str:
        """The marker that an attempt gets which is seen for the first time now."""
        return self._marker

    def after_fork(self) -> None:
        """Forget everything, in a child process: new marker, no counts, a lock that nobody holds."""
        self._reset(self._foreign | {entry.marker for entry in self._entries.values()})

    def is_foreign(self, marker: str | None) -> bool:
        """Whether a span with this marker began before the fork that made this process: its parent exports it."""
        forks.notice()
        return marker in self._foreign

    def started(self, key: Key, span_id: int, place: Place) -> Started:
        """A span of the attempt has started; returns what it carries. `place` is where a sibling of it hangs."""
        failed: OSError | None = None
        with self._held():
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
            slot, late = entry.slot, False
            if slot is not None:
                entry.begun += 1
                if late := slot.begun(entry.begun):
                    entry.begun -= 1
                    slot.begun(entry.begun)
                    entry.late.add(span_id)
            started = Started(entry.marker, late)
        if failed is not None:
            note_failure("the ledger", failed)
        if new and slot is None and self._on_unrecorded is not None:
            self._on_unrecorded(key)
        return started

    def close(self, ending: Set[int] = frozenset()) -> None:
        """The process ends: what is open now will not be exported. Spans that are `ending` may be or not: they stay in flight."""
        with self._held():
            for entry in self._entries.values():
                entry.close(ending)

    def over(self, key: Key) -> None:
        """The process does nothing more for the attempt: what is open now will not be exported."""
        with self._held():
            if (entry := self._entries.get(key)) is not None:
                entry.close()

    def reopen(self) -> None:
        """It does not end after all."""
        with self._held():
            for entry in self._entries.values():
                if entry.slot is not None:
                    entry.slot.closed(closed=False)
                    entry.given_up.clear()
                    entry.record()

    def ended(self, key: Key, span_id: int, *, marker: str | None) -> bool:
        """A span has ended; it counts if it carries the attempt's `marker` (None: it is not exported).

        True where it was the attempt's last open span. A span that began before a fork is not ours and counts nothing.
        """
        with self._held():
            entry = self._entries.get(key)
            if entry is None or span_id not in entry.open:
                return False
            entry.open.discard(span_id)
            counts = marker == entry.marker
            entry.spans += counts
            if span_id in entry.late:
                entry.late.discard(span_id)
            elif entry.slot is not None:
                entry.given_up.discard(span_id)
                entry.ended += counts
                entry.abandoned += not counts
                entry.record()
            return not entry.open

    def dropped(self, key: Key, marker: str) -> None:
        """The exporter gave a counted span up."""
        with self._held():
            entry = self._entries.get(key)
            if entry is not None and entry.marker == marker:
                entry.dropped += 1
                entry.record()

    def count(self, key: Key) -> Count | None:
        """The attempt's numbers; None where this process has seen nothing of it."""
        with self._held():
            entry = self._entries.get(key)
            return entry.count() if entry is not None else None

    def sealed(self, key: Key, count: Count) -> None:
        """A seal with these numbers was acked."""
        with self._held():
            entry = self._entries.get(key)
            if entry is not None and entry.marker == count.marker:
                entry.sealed = count

    def is_sealed(self, key: Key, count: Count) -> bool:
        """Whether the last acked seal said just that."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and entry.sealed == count

    def unsealed(self) -> list[Key]:
        """Attempts without an open span whose numbers have changed since their last acked seal."""
        with self._held():
            return [key for key, entry in self._entries.items() if not entry.open and entry.sealed != entry.count()]

    def unproven(self) -> list[Key]:
        """Attempts whose numbers are in no record, or in no acked seal because spans are open."""
        with self._held():
            return [key for key, entry in self._entries.items() if entry.slot is None or (entry.open and entry.sealed != entry.count())]

    def unrecorded(self) -> list[Key]:
        """Attempts that are counted here and in no record."""
        with self._held():
            return [key for key, entry in self._entries.items() if entry.slot is None]

    def place(self, key: Key) -> Place | None:
        """Where a span about the whole attempt hangs: beside the first span seen of it."""
        with self._held():
            entry = self._entries.get(key)
            return entry.place if entry is not None else None

    def is_idle(self, key: Key) -> bool:
        """Whether the attempt is known and no span of it is open."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and not entry.open

    def is_open(self, key: Key) -> bool:
        """Whether a span of the attempt is open."""
        with self._held():
            entry = self._entries.get(key)
            return entry is not None and bool(entry.open)

    def forget(self, key: Key) -> None:
        """Drop the attempt's counts; should it come back, it comes under a marker that it never had."""
        with self._held():
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._freed(entry)

    def _forget_read(self) -> None:
        """Drop attempts that their runner has read and that are over here as well: a pool's worker lives on for thousands.

        The oldest few are looked at. One that is read and has an open span, which a leak may keep open for ever, is looked at again later.
        """
        for key in list(islice(self._entries, LOOKED_AT)):
            entry = self._entries[key]
            if self._records is None or (entry.slot is not None and not entry.slot.is_read):
                break
            del self._entries[key]
            if entry.slot is None or entry.open:
                self._entries[key] = entry
            else:
                self._freed(entry)

    def _forget_one(self) -> None:
        """Drop the oldest attempt without an open span, else the oldest."""
        key = next((key for key, entry in self._entries.items() if not entry.open), next(iter(self._entries)))
        self._freed(self._entries.pop(key))

    def _freed(self, entry: _Entry) -> None:
        self._marker = new_marker()
        if entry.slot is not None:
            entry.slot.free()
