"""Seals: spans that say how many spans an attempt has ended in this process, so that a reader knows whether it has them all.

One is sent when the attempt has been idle for a moment, at the end of the attempt, and when the process ends. But for a last one, none is
sent while a span is open: a seal also says that nothing was in flight at that moment.

A process that lives on, as a service does, cannot know when the agent has ended that it worked for. It sends its seal again, after longer
and longer pauses: one that was made when the agent had ended proves that nothing of it was lost.
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

IDLE_SECONDS: Final = 1.0
"""An attempt whose last open span ended so long ago is sealed; a new span calls it off."""
REPEAT_SECONDS: Final = (4.0, 16.0, 64.0, 256.0, 1024.0)
"""So long after a seal it is sent again, by a process that repeats them."""
TRACER_NAME: Final = "agl_otel"


class Sealer:
    """Sends seals with tracers of `provider`; `flush(timeout_seconds)` says whether all ended spans were exported."""

    def __init__(self, ledger: Ledger, provider: trace.TracerProvider, flush: Callable[[float], bool], *, repeats: bool = False) -> None:
        """`repeats`: whether the process works for attempts of which it does not know when they end."""
        self._repeats = repeats
        self._ledger = ledger
        self._tracer = provider.get_tracer(TRACER_NAME)
        self._flush = flush
        self.after_fork()

    def after_fork(self) -> None:
        """Start over in a child process: nothing is due, the thread is the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._due: dict[Key, float] = {}
        self._again: list[tuple[float, int, Key]] = []
        """A heap: when, for which time, whose seal is repeated."""
        self._latest: dict[Key, float] = {}
        """Which of them counts."""
        self._announced: list[Key] = []
        self._thread: threading.Thread | None = None

    @while_running
    def idle(self, key: Key) -> None:
        """The attempt's last open span has ended: seal it in a moment, unless another one starts."""
        with self._changed:
            asleep = not self._due  # else the thread wakes at an earlier time than this one's, and sees it then
            self._due.pop(key, None)  # to the end: the dict stays sorted by time
            self._due[key] = time.monotonic() + IDLE_SECONDS
            self._ensure_thread()
            if asleep:
                self._changed.notify()

    @while_running
    def announce(self, key: Key) -> None:
        """This process works for an attempt and keeps no record of it: have its marker sent at once, by the thread that seals."""
        with self._changed:
            self._announced.append(key)
            self._ensure_thread()
            self._changed.notify()

    def seal(
        self, keys: Sequence[Key], *, timeout_seconds: float, closing: bool = False, again: bool = False
    ) -> tuple[dict[Key, Count], bool]:
        """Seal what has changed since its last seal, and flush once. Returns the numbers of all `keys`, and whether they were acked.

        With `closing` each of them gets its last seal: this process does nothing more for it. With `again` one that has not changed is
        sealed, too.
        """
        now = time.time_ns()  # before the counting: what a seal says holds from then on
        counts = {key: count for key in keys if (count := self._ledger.count(key)) is not None}
        for key, count in counts.items():
            if closing or (not count.open and (again or not self._ledger.is_sealed(key, count))):
                says: dict[str, int | bool] = {conventions.SEAL_SPANS: count.spans, conventions.SEAL_DROPPED: count.dropped}
                self._send(key, count.marker, says | {conventions.SEAL_CLOSING: True} if closing else says, now)
        acked = self._flush(timeout_seconds)
        if acked:
            for key, count in counts.items():
                self._ledger.sealed(key, count)
        return counts, acked

    def seal_all(self, timeout_seconds: float) -> bool:
        """Seal every attempt that has changed, and flush."""
        return self.seal(self._ledger.unsealed(), timeout_seconds=timeout_seconds)[1]

    def _send(self, key: Key, marker: str, says: dict[str, int | bool], now: int) -> None:
        """Send a seal; one that says nothing announces the marker."""
        ids = {conventions.ROLLOUT_ID: key[0], conventions.PROCESS: marker}
        if key[1]:
            ids[conventions.ATTEMPT_ID] = key[1]
        context = context_at(self._ledger.place(key))
        self._tracer.start_span(conventions.SPAN_SEAL, context, attributes={**ids, **says}, start_time=now).end(now)

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="agl-otel-seal", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter shutdown; the end of the process seals
                self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._announced and (wait := self._seconds_left()) != 0:
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
        """How long until there is something to do; None: until somebody says so."""
        times = [*([next(iter(self._due.values()))] if self._due else ()), *([self._again[0][0]] if self._again else ())]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _to_repeat(self, now: float) -> dict[Key, int]:
        """{attempt whose seal is due again: which time the next one is}."""
        due: dict[Key, int] = {}
        while self._again and self._again[0][0] <= now:
            at, turn, key = heapq.heappop(self._again)
            if self._latest.get(key) == at:  # or it was sealed anew since then
                del self._latest[key]
                due[key] = turn + 1
        return due

    def _repeat(self, turns: Mapping[Key, int]) -> None:
        """Have what was sealed now sealed again, where it is not for the last time."""
        now = time.monotonic()
        with self._changed:
            for key, turn in turns.items():
                if turn < len(REPEAT_SECONDS) and self._ledger.count(key) is not None:
                    self._latest[key] = now + REPEAT_SECONDS[turn]
                    heapq.heappush(self._again, (now + REPEAT_SECONDS[turn], turn, key))


def context_at(place: Place | None) -> Context:
    """A context whose current span is the one at `place`; an empty one without."""
    if place is None:
        return Context()
    parent = SpanContext(place[0], place[1], is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
