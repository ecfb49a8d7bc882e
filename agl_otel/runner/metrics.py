"""The runner's metrics: running attempts, and ended ones by outcome."""

from __future__ import annotations

from collections.abc import Callable

from agl_otel.runner.running import RunnerEvent
from agl_otel.telemetry.meters import Meters


class RunnerMeters:
    """Updates the runner's metrics. Pass `record` to the runner as `on_event`; it calls the given `on_event` in turn."""

    def __init__(self, on_event: Callable[[RunnerEvent], None] | None = None) -> None:
        self._on_event = on_event
        self._running = 0
        self.meters = Meters()
        self.meters.gauge("agl.runner.running", "Attempts that run now.", lambda: [({}, self._running)])
        self._ended = self.meters.counter("agl.runner.attempts.total", "Attempts that ended.", "outcome")
        self._took = self.meters.durations("agl.runner.attempts.duration", "Seconds that their agents ran.", "outcome")

    def record(self, event: RunnerEvent) -> None:
        """Record that an attempt started or ended."""
        if event.kind == "started":
            self._running += 1
        else:
            self._running -= 1
            self._ended(event.outcome)
            self._took(event.seconds, event.outcome)
        if self._on_event is not None:
            self._on_event(event)
