"""Export ended spans in order and without loss, instead of the SDK's BatchSpanProcessor, which drops spans in bursts.

The queue is limited by count and by bytes. When it is full, a thread that ends a span blocks while exports succeed (back-pressure);
dropped spans are passed to `on_dropped`, so that seals count them. One worker thread exports the queue in batches; `force_flush` waits
for it, so concurrent flushes share exports. After a fork the child starts with an empty queue and a new exporter.
"""

from __future__ import annotations

# The first address look-up would import it; a fork during that import would wait for the import lock for ever.
import encodings.idna  # noqa: F401  # pyright: ignore[reportUnusedImport]  # imported for its effect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agl_otel_hook import forks
from agl_otel_hook.guard import never_raises, note_failure, while_running
from agl_otel_hook.wire import BareSpan
from agl_otel_hook.writable import writable

MAX_QUEUE_SPANS: Final = 20_000
MAX_QUEUE_BYTES: Final = 256 << 20
MAX_BATCH_SPANS: Final = 512
MAX_BATCH_BYTES: Final = 3 << 20  # receivers with gRPC's default limit take 4 MiB
DELAY_SECONDS: Final = 0.2  # batching delay: how long a first span waits for others
BACK_PRESSURE_SECONDS: Final = 5.0  # limit on how long ending a span may block while nothing is exported


class ExportProcessor(SpanProcessor):
    """Queue of the sampled spans whose ids `takes` accepts, exported with `exporter`; `rebuild` makes a new exporter after a fork.

    Spans for which `apart` returns different texts are never exported in one batch (None: any may be).
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        rebuild: Callable[[], SpanExporter],
        takes: Callable[[int], bool],
        on_dropped: Callable[[Sequence[ReadableSpan]], None] | None = None,
        apart: Callable[[ReadableSpan], str] | None = None,
    ) -> None:
        self._takes = takes
        self._apart = apart
        self._rebuild = rebuild
        self._on_dropped = on_dropped
        self.on_settled: Callable[[Sequence[ReadableSpan]], None] | None = None
        """Called with spans that were exported or dropped."""
        self._abandoned: list[SpanExporter] = []
        self._reset(exporter)
        forks.register(self._after_fork)

    def _reset(self, exporter: SpanExporter | None) -> None:
        self._exporter = exporter
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[tuple[ReadableSpan, int]] = deque()
        self._bytes = 0
        self._accepted = 0
        self._settled = 0
        self._flush_to = 0
        self._healthy = True
        self._stopping = False
        self.is_ending = False
        """Whether the process ends: then no more than a batch is queued, so that the last flush is short whatever other threads do."""
        self._worker: threading.Thread | None = None
        self.dropped = 0
        """Number of spans dropped so far."""

    def _after_fork(self) -> None:
        if self._exporter is not None:
            self._abandoned.append(self._exporter)  # never closed: that would write to the parent's connection
        self._reset(None)

    @while_running
    @never_raises
    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span (OpenTelemetry calls this)."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled or not self._takes(context.span_id):
            return
        size = approximate_bytes(span)
        with self._changed:
            while not self._fits(size) and self._healthy and not self._stopping:
                self._ensure_worker()
                before = self._settled
                if not self._changed.wait_for(partial(self._has_moved, before, size), BACK_PRESSURE_SECONDS):
                    break
            taken = self._fits(size) and not self._stopping
            if taken:
                self._queue.append((span, size))
                self._bytes += size
                self._accepted += 1
                self._ensure_worker()
                if len(self._queue) == 1 or len(self._queue) == MAX_BATCH_SPANS:
                    self._changed.notify_all()
        if not taken:
            self._drop([span])

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until all spans queued before this call are exported. Return False on timeout, or if spans were dropped meanwhile."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            target, dropped = self._accepted, self.dropped
            self._flush_to = max(self._flush_to, target)
            working = self._ensure_worker() if self._settled < target else True
            self._changed.notify_all()
            if working:
                self._changed.wait_for(lambda: self._settled >= target, deadline - time.monotonic())
        while not working and self._settled < target and time.monotonic() < deadline:  # interpreter shutdown: no new threads
            self._export_batch()
        return self._settled >= target and self.dropped == dropped

    def shutdown(self, timeout_seconds: float = 10.0) -> None:
        """Export the queue, drop what is left at the timeout, and close the exporter."""
        with self._changed:
            if self._stopping:
                return
        self.force_flush(int(timeout_seconds * 1000))
        with self._changed:
            self._stopping = True
            left = [span for span, _ in self._queue]
            self._queue.clear()
            self._changed.notify_all()
        if left:
            self._drop(left)
        if self._exporter is not None:
            self._exporter.shutdown()

    def _fits(self, size: int) -> bool:
        most = MAX_BATCH_SPANS if self.is_ending else MAX_QUEUE_SPANS
        return not self._queue or (len(self._queue) < most and self._bytes + size <= MAX_QUEUE_BYTES)

    def _has_moved(self, before: int, size: int) -> bool:
        return self._settled != before or self._fits(size) or not self._healthy or self._stopping

    def _ensure_worker(self) -> bool:
        if self._worker is not None and self._worker.is_alive():
            return True
        self._worker = threading.Thread(target=self._work, name="agl-otel-export", daemon=True)
        try:
            self._worker.start()
        except RuntimeError:  # at interpreter shutdown; force_flush exports in its own thread then
            self._worker = None
        return self._worker is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                ready = time.monotonic() + DELAY_SECONDS
                self._changed.wait_for(self._is_due, ready - time.monotonic())
            self._export_batch()

    def _is_due(self) -> bool:
        return self._stopping or self._flush_to > self._settled or len(self._queue) >= MAX_BATCH_SPANS

    def _export_batch(self) -> None:
        with self._changed:
            batches = self._next_batches()
        if not batches:
            return
        healthy = False
        for batch, size in batches:
            exported = self._export(batch)
            if not exported:
                self._drop(batch)
            elif self.on_settled is not None:
                self.on_settled(batch)
            healthy = healthy or exported
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()
        with self._changed:
            self._settled += sum(len(batch) for batch, _ in batches)
            self._healthy = healthy
            self._changed.notify_all()

    def _next_batches(self) -> list[tuple[list[ReadableSpan], int]]:
        if self._apart is None:
            return [_cut(self._queue)] if self._queue else []
        kinds: dict[str, deque[tuple[ReadableSpan, int]]] = {}
        while self._queue:
            kinds.setdefault(self._apart(self._queue[0][0]), deque()).append(self._queue.popleft())
        batches: list[tuple[list[ReadableSpan], int]] = []
        for kind in kinds.values():
            while kind:
                batches.append(_cut(kind))
        return batches

    def _export(self, batch: Sequence[ReadableSpan]) -> bool:
        try:
            if self._exporter is None:
                self._exporter = self._rebuild()
            with suppress_instrumentation():
                return self._exporter.export([writable(span) for span in batch]) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001  # the named boundary: whatever an exporter raises, its spans count as dropped
            note_failure(f"export by {type(self._exporter).__name__}", error)
            return False

    def _drop(self, spans: Sequence[ReadableSpan]) -> None:
        with self._changed:
            self.dropped += len(spans)
        note_failure("export", f"{len(spans)} spans were given up")
        if self._on_dropped is not None:
            self._on_dropped(spans)
        if self.on_settled is not None:
            self.on_settled(spans)


def _cut(queue: deque[tuple[ReadableSpan, int]]) -> tuple[list[ReadableSpan], int]:
    """Remove one batch from the front of a queue that is not empty. Return it and its size in bytes."""
    batch: list[ReadableSpan] = []
    size = 0
    while queue and len(batch) < MAX_BATCH_SPANS and (not batch or size + queue[0][1] <= MAX_BATCH_BYTES):
        span, span_size = queue.popleft()
        batch.append(span)
        size += span_size
    return batch, size


def approximate_bytes(span: ReadableSpan) -> int:
    """Estimate the size of a span on the wire in bytes; accurate for large values (strings, bytes, arrays of numbers)."""
    if isinstance(span, BareSpan):
        return len(span.wire_bytes())
    size = 200
    for value in (span.attributes or {}).values():
        size += 40
        if isinstance(value, (str, bytes)):
            size += len(value)
        elif isinstance(value, tuple):
            size += sum(len(v) for v in value if isinstance(v, str)) + 11 * len(value)
    for event in span.events:
        size += 60 + sum(len(v) if isinstance(v, (str, bytes)) else 12 for v in (event.attributes or {}).values())
    return size
