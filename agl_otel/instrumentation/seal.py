"""Seals: spans that say how many spans an attempt has ended in this process, so that a reader knows whether it has them all.

One is sent when the attempt has been idle for a moment, at the end of the attempt, and when the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from agl_otel import semconv
from agl_otel.instrumentation.context import Key
from agl_otel.instrumentation.guard import note_failure
from agl_otel.instrumentation.ledger import Count, Ledger, Place

IDLE_SECONDS: Final = 1.0
"""An attempt whose last open span ended so long ago is sealed; a new span calls it off."""
TRACER_NAME: Final = "agl_otel"


class Sealer:
    """Sends seals with tracers of `provider`; `flush(timeout_seconds)` says whether all ended spans were exported."""

    def __init__(self, ledger: Ledger, provider: trace.TracerProvider, flush: Callable[[float], bool]) -> None:
        self._ledger = ledger
        self._tracer = provider.get_tracer(TRACER_NAME)
        self._flush = flush
        self.after_fork()

    def after_fork(self) -> None:
        """Start over in a child process: nothing is due, the thread is the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._due: dict[Key, float] = {}
        self._announced: list[Key] = []
        self._thread: threading.Thread | None = None

    def idle(self, key: Key) -> None:
        """The attempt's last open span has ended: seal it in a moment, unless another one starts."""
        with self._changed:
            asleep = not self._due  # else the thread wakes at an earlier time than this one's, and sees it then
            self._due.pop(key, None)  # to the end: the dict stays sorted by time
            self._due[key] = time.monotonic() + IDLE_SECONDS
            self._ensure_thread()
            if asleep:
                self._changed.notify()

    def announce(self, key: Key) -> None:
        """This process works for an attempt and keeps no record of it: have its marker sent at once, by the thread that seals."""
        with self._changed:
            self._announced.append(key)
            self._ensure_thread()
            self._changed.notify()

    def seal(self, keys: Sequence[Key], *, timeout_seconds: float, closing: bool = False) -> tuple[dict[Key, Count], bool]:
        """Seal what has changed since its last seal, and flush once. Returns the numbers of all `keys`, and whether they were acked.

        With `closing` each of them gets its last seal: this process does nothing more for it.
        """
        counts = {key: count for key in keys if (count := self._ledger.count(key)) is not None}
        for key, count in counts.items():
            if closing or not self._ledger.is_sealed(key, count):
                says: dict[str, int | bool] = {semconv.SEAL_SPANS: count.spans, semconv.SEAL_DROPPED: count.dropped}
                self._send(key, count.marker, says | {semconv.SEAL_CLOSING: True} if closing else says)
        acked = self._flush(timeout_seconds)
        if acked:
            for key, count in counts.items():
                self._ledger.sealed(key, count)
        return counts, acked

    def seal_all(self, timeout_seconds: float) -> bool:
        """Seal every attempt that has changed, and flush."""
        return self.seal(self._ledger.unsealed(), timeout_seconds=timeout_seconds)[1]

    def _send(self, key: Key, marker: str, says: dict[str, int | bool]) -> None:
        """Send a seal; one that says nothing announces the marker."""
        ids = {semconv.ROLLOUT_ID: key[0], semconv.PROCESS: marker}
        if key[1]:
            ids[semconv.ATTEMPT_ID] = key[1]
        now = time.time_ns()
        context = context_at(self._ledger.place(key))
        self._tracer.start_span(semconv.SPAN_SEAL, context, attributes={**ids, **says}, start_time=now).end(now)

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
                while not self._announced and (not self._due or next(iter(self._due.values())) > time.monotonic()):
                    self._changed.wait(next(iter(self._due.values())) - time.monotonic() if self._due else None)
                now = time.monotonic()
                announced, self._announced = self._announced, []
                keys = [key for key, due in self._due.items() if due <= now]
                for key in keys:
                    del self._due[key]
            try:
                for key in announced:
                    if (count := self._ledger.count(key)) is not None:
                        self._send(key, count.marker, {})
                if announced:
                    self._flush(10.0)
                self.seal([key for key in keys if self._ledger.is_idle(key)], timeout_seconds=10.0)
            except Exception as error:  # noqa: BLE001  # the named boundary: the thread lives as long as the process
                note_failure("seal", error)


def context_at(place: Place | None) -> Context:
    """A context whose current span is the one at `place`; an empty one without."""
    if place is None:
        return Context()
    parent = SpanContext(place[0], place[1], is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
