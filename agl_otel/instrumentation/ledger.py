"""How many spans each attempt has ended in this process: the numbers that seals carry.

Plain counting under one lock; no OpenTelemetry, no clock, no I/O. A marker stands for one process (new after a fork) and never
counts an attempt twice: when an attempt is forgotten, every attempt that is new from then on gets a new marker.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import Final

from agl_otel.instrumentation.context import Key

MAX_ATTEMPTS: Final = 100_000
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


@dataclass(slots=True)
class _Entry:
    marker: str
    place: Place
    spans: int = 0
    dropped: int = 0
    open: set[int] = field(default_factory=set[int])
    sealed: Count | None = None


class Ledger:
    """Counts by attempt. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self, foreign: frozenset[str] = frozenset()) -> None:
        self._foreign = foreign
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._marker = new_marker()

    @property
    def marker(self) -> str:
        """The marker that an attempt gets which is seen for the first time now."""
        return self._marker

    def after_fork(self) -> None:
        """Forget everything, in a child process: new marker, no counts, a lock that nobody holds."""
        self._reset(self._foreign | {entry.marker for entry in self._entries.values()})

    def is_foreign(self, marker: str) -> bool:
        """Whether a span with this marker began before the fork that made this process: its parent exports it."""
        return marker in self._foreign

    def started(self, key: Key, span_id: int, place: Place) -> str:
        """A span of the attempt has started; returns the marker that it carries. `place` is where a sibling of it hangs."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                if len(self._entries) >= MAX_ATTEMPTS:
                    self._forget_one()
                entry = self._entries[key] = _Entry(self._marker, place)
            entry.open.add(span_id)
            return entry.marker

    def ended(self, key: Key, span_id: int, *, marker: str | None) -> bool:
        """A span has ended; it counts if it carries the attempt's `marker` (None: it is not exported).

        True where it was the attempt's last open span. A span that began before a fork is not ours and counts nothing.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or span_id not in entry.open:
                return False
            entry.open.discard(span_id)
            if marker == entry.marker:
                entry.spans += 1
            return not entry.open

    def dropped(self, key: Key, marker: str) -> None:
        """The exporter gave a counted span up."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.marker == marker:
                entry.dropped += 1

    def count(self, key: Key) -> Count | None:
        """The attempt's numbers; None where this process has seen nothing of it."""
        with self._lock:
            entry = self._entries.get(key)
            return Count(entry.marker, entry.spans, entry.dropped) if entry is not None else None

    def sealed(self, key: Key, count: Count) -> None:
        """A seal with these numbers was acked."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.marker == count.marker:
                entry.sealed = count

    def is_sealed(self, key: Key, count: Count) -> bool:
        """Whether the last acked seal said just that."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.sealed == count

    def unsealed(self) -> list[Key]:
        """Attempts whose numbers have changed since their last acked seal."""
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.sealed != Count(entry.marker, entry.spans, entry.dropped)]

    def place(self, key: Key) -> Place | None:
        """Where a span about the whole attempt hangs: beside the first span seen of it."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.place if entry is not None else None

    def is_idle(self, key: Key) -> bool:
        """Whether the attempt is known and no span of it is open."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not entry.open

    def forget(self, key: Key) -> None:
        """Drop the attempt's counts; should it come back, it comes under a marker that it never had."""
        with self._lock:
            if self._entries.pop(key, None) is not None:
                self._marker = new_marker()

    def _forget_one(self) -> None:
        key = next((key for key, entry in self._entries.items() if not entry.open), None)
        if key is not None:
            del self._entries[key]
            self._marker = new_marker()
