"""Back-pressure for a provider that is not ours: the SDK's batch processor drops spans beyond its queue of 2048."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from agl_otel_hook.guard import never_raises, while_running

EVERY_SPANS: Final = 1000  # half of the queue
SLOW_SECONDS: Final = 2.0
CALM_SECONDS: Final = 30.0  # an unreachable collector must not delay the agent


class BackPressure(SpanProcessor):
    """Call `flush` at every EVERY_SPANS-th ended span, in the thread that ends it; not for CALM_SECONDS after a slow flush."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._ended = 0
        self._calm_until = 0.0

    @while_running
    @never_raises
    def on_end(self, span: ReadableSpan) -> None:
        """Count the span, and flush if due (OpenTelemetry calls this)."""
        self._ended += 1
        started = time.monotonic()
        if self._ended % EVERY_SPANS or started < self._calm_until or not is_instrumentation_enabled():  # not from within an export
            return
        self._flush()
        if time.monotonic() - started > SLOW_SECONDS:
            self._calm_until = time.monotonic() + CALM_SECONDS

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: this processor holds no spans (older SDKs: the inherited method returns nothing, a failure)."""
        return True
