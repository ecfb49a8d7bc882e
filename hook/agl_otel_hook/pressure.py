"""Back-pressure for a tracer provider that is not ours: the SDK's batch processor drops what does not fit into its queue of 2048."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from agl_otel_hook.guard import never_raises, while_running

EVERY_SPANS: Final = 1000  # half of the queue
SLOW_SECONDS: Final = 2.0
CALM_SECONDS: Final = 30.0  # a collector that is away must not hold the agent up


class BackPressure(SpanProcessor):
    """Calls `flush` after every EVERY_SPANS ended spans, in the thread that ended the last; a slow flush calls it off for a while."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._ended = 0
        self._calm_until = 0.0

    @while_running
    @never_raises
    def on_end(self, span: ReadableSpan) -> None:
        """Count, and flush when it is time (OpenTelemetry calls this)."""
        self._ended += 1
        started = time.monotonic()
        if self._ended % EVERY_SPANS or started < self._calm_until or not is_instrumentation_enabled():  # not from within an export
            return
        self._flush()
        if time.monotonic() - started > SLOW_SECONDS:
            self._calm_until = time.monotonic() + CALM_SECONDS
