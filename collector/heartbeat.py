"""Heartbeats: after the fsync, report each attempt's span count to the queue, at most once a second per attempt.

Reports carry the time of receipt, so that a slow ClickHouse or a replayed log neither delays nor fakes one. Attempt spans and seals count
as 0 spans: they are a heartbeat, but do not set an attempt to running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

from agl_otel.errors import AglError
from agl_otel.queue.updates import Observation

INTERVAL_SECONDS: Final = 1.0
MAX_ATTEMPTS: Final = 100_000  # limit on attempts that wait while the queue is unavailable
_logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Receives the reports; the queue's client implements it."""

    async def observe(self, observations: Sequence[Observation], *, sent_at: float | None = None) -> None:
        """Report. Raises UnavailableError while the queue is unavailable."""
        ...


class Heartbeats:
    """Collects heartbeats and sends them; start it with `run()` as a task."""

    def __init__(self, observer: Observer, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._observer = observer
        self._interval = interval_seconds
        self._waiting: dict[tuple[str, str], Observation] = {}
        self._sent_at: dict[tuple[str, str], float] = {}
        self._wake = asyncio.Event()
        self.failures = 0

    def add(self, rollout_id: str, attempt_id: str, spans: int, received_at: float) -> None:
        """Add `spans` new spans of an attempt, received at `received_at` (Unix seconds)."""
        key = (rollout_id, attempt_id)
        before = self._waiting.get(key)
        if before is None and len(self._waiting) >= MAX_ATTEMPTS:
            return
        if before is not None:
            spans, received_at = spans + before.spans, max(received_at, before.received_at)
        self._waiting[key] = Observation(rollout_id, attempt_id, spans, received_at)
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()
            if self._waiting:  # reported a moment ago, or the queue is unavailable
                self._wake.set()
            await asyncio.sleep(self._interval / (4 if self._waiting else 20))

    async def flush(self, *, everything: bool = False) -> None:
        """Report the attempts that were not reported within the last interval, or all that wait."""
        now = time.monotonic()
        self._sent_at = {key: at for key, at in self._sent_at.items() if now - at < self._interval}
        due = [beat for key, beat in self._waiting.items() if everything or key not in self._sent_at]
        if not due:
            return
        for beat in due:
            key = (beat.rollout_id, beat.attempt_id)
            del self._waiting[key]
            self._sent_at[key] = now
        try:
            await self._observer.observe(due, sent_at=time.time())
        except AglError as error:  # a failed heartbeat must not cost a span: count it, keep it, continue
            self.failures += 1
            if self.failures == 1:
                _logger.warning("the queue takes no heartbeats; they are kept and sent later: %s", error)
            for beat in due:
                self.add(beat.rollout_id, beat.attempt_id, beat.spans, beat.received_at)
