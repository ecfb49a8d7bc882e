"""Seals: spans with the number of spans that an attempt has ended in this process, so that a reader can tell whether it has all of them.

A seal is sent when the attempt has been idle for IDLE_SECONDS, at the end of the attempt, and at the end of the process. Except for the
last (closing) one, none is sent while a span is open: a seal also means that nothing was in flight at its time.

A long-running process, e.g. a service, does not know when the agent that called it has ended. It repeats its seal at growing intervals:
one that was made after the agent's end proves that nothing of the attempt was lost.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from agl_otel_hook import conventions
from agl_otel_hook.context import Key
from agl_otel_hook.guard import note_failure, while_running
from agl_otel_hook.ledger import Count, Ledger, Place
from agl_otel_hook.processor import keep

IDLE_SECONDS: Final = 1.0
"""How long after the end of its last open span an attempt is sealed; a new span cancels that."""
REPEAT_SECONDS: Final = (4.0, 16.0, 64.0, 256.0, 1024.0)
"""Intervals from one seal to the next, in a process that repeats them."""
TRACER_NAME: Final = "agl_otel"


class Sealer:
    """Sender of seals, with a tracer of `provider`; `flush(timeout_seconds)` returns whether all ended spans were exported."""

    def __init__(self, ledger: Ledger, provider: trace.TracerProvider, flush: Callable[[float], bool], *, repeats: bool = False) -> None:
        """`repeats`: whether to repeat seals, because the process does not know when its attempts end."""
        self._repeats = repeats
        self._ledger = ledger
        self._tracer = provider.get_tracer(TRACER_NAME)
        self._flush = flush
        self.after_fork()

    def after_fork(self) -> None:
        """Reset in a child process: nothing is due, and there is no thread."""
        self._changed = threading.Condition(threading.Lock())
        self._due: dict[Key, float] = {}
        self._again: list[tuple[float, int, Key]] = []
        """Heap of due repetitions: (time, index into REPEAT_SECONDS, attempt)."""
        self._latest: dict[Key, float] = {}
        """The time of each attempt's valid entry in that heap; others are stale."""
        self._announced: list[Key] = []
        self._thread: threading.Thread | None = None

    @while_running
    def idle(self, key: Key) -> None:
        """Schedule a seal of the attempt, whose last open span has ended; a new span cancels it."""
        with self._changed:
            asleep = not self._due  # else the thread wakes before this one is due
            self._due.pop(key, None)  # to the end: the dict stays sorted by time
            self._due[key] = time.monotonic() + IDLE_SECONDS
            self._ensure_thread()
            if asleep:
                self._changed.notify()

    @while_running
    def announce(self, key: Key) -> None:
        """Send the marker for an attempt without a record at once, in the sealing thread."""
        with self._changed:
            self._announced.append(key)
            self._ensure_thread()
            self._changed.notify()

    def seal(
        self, keys: Sequence[Key], *, timeout_seconds: float, closing: bool = False, again: bool = False
    ) -> tuple[dict[Key, Count], bool]:
        """Seal the attempts whose counts have changed since their last seal, and flush once.

        With `closing` each gets its last seal: this process does nothing more for it. With `again` unchanged ones are sealed as well.
        Return the counts of all known `keys`, and whether they were acknowledged.
        """
        now = time.time_ns()  # before counting: a seal holds from that time on
        counts = {key: count for key in keys if (count := self._ledger.count(key)) is not None}
        for key, count in counts.items():
            if closing or (not count.open and (again or not self._ledger.is_sealed(key, count))):
                attributes: dict[str, int | bool] = {conventions.SEAL_SPANS: count.spans, conventions.SEAL_DROPPED: count.dropped}
                self._send(key, count.marker, attributes | {conventions.SEAL_CLOSING: True} if closing else attributes, now)
        acked = self._flush(timeout_seconds)
        if acked:
            for key, count in counts.items():
                self._ledger.sealed(key, count)
        return counts, acked

    def seal_all(self, timeout_seconds: float) -> bool:
        """Seal every attempt that has changed, and flush. Return whether the flush succeeded."""
        return self.seal(self._ledger.unsealed(), timeout_seconds=timeout_seconds)[1]

    def _send(self, key: Key, marker: str, attributes: dict[str, int | bool], now: int) -> None:
        """Send a seal; with empty `attributes` it only announces the marker."""
        ids = {conventions.ROLLOUT_ID: key[0], conventions.PROCESS: marker}
        if key[1]:
            ids[conventions.ATTEMPT_ID] = key[1]
        context = context_at(self._ledger.place(key))
        span = self._tracer.start_span(conventions.SPAN_SEAL, context, attributes={**ids, **attributes}, start_time=now)
        keep(span, {**ids, **attributes})
        span.end(now)

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="agl-otel-seal", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter shutdown; Hook.close seals then
                self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._announced and (wait := self._seconds_left()) != 0:
                    if wait is None:  # a process may have many senders, one after the other: no thread outlives its work
                        self._thread = None
                        return
                    self._changed.wait(wait)
                now = time.monotonic()
                announced, self._announced = self._announced, []
                keys = [key for key, due in self._due.items() if due <= now]
                for key in keys:
                    del self._due[key]
                repeated = self._to_repeat(now)
            try:
                for key in announced:
                    if (count := self._ledger.count(key)) is not None:
                        self._send(key, count.marker, {}, time.time_ns())
                if announced:
                    self._flush(10.0)
                if idle := [key for key in keys if self._ledger.is_idle(key)]:
                    self.seal(idle, timeout_seconds=10.0)
                if repeated:
                    self.seal([*repeated], timeout_seconds=10.0, again=True)
                if self._repeats:
                    self._repeat(dict.fromkeys(keys, 0) | repeated)
            except Exception as error:  # noqa: BLE001  # the named boundary: the thread lives as long as the process
                note_failure("seal", error)

    def _seconds_left(self) -> float | None:
        """Return the seconds until a seal is due; None where none is scheduled."""
        times = [*([next(iter(self._due.values()))] if self._due else ()), *([self._again[0][0]] if self._again else ())]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _to_repeat(self, now: float) -> dict[Key, int]:
        """Remove due repetitions and return {attempt: index into REPEAT_SECONDS of the next one}."""
        due: dict[Key, int] = {}
        while self._again and self._again[0][0] <= now:
            at, turn, key = heapq.heappop(self._again)
            if self._latest.get(key) == at:  # else it has been sealed since
                del self._latest[key]
                due[key] = turn + 1
        return due

    def _repeat(self, turns: Mapping[Key, int]) -> None:
        """Schedule the next repetition for the attempts just sealed, if REPEAT_SECONDS has one."""
        now = time.monotonic()
        with self._changed:
            for key, turn in turns.items():
                if turn < len(REPEAT_SECONDS) and self._ledger.count(key) is not None:
                    self._latest[key] = now + REPEAT_SECONDS[turn]
                    heapq.heappush(self._again, (now + REPEAT_SECONDS[turn], turn, key))


def context_at(place: Place | None) -> Context:
    """Return a context whose current span is the one at `place`; an empty context for None."""
    if place is None:
        return Context()
    parent = SpanContext(place[0], place[1], is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
