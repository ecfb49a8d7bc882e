"""The work of `agl-otel maintain`: the late pass and adoption, one at a time; in a pass over everything also the removal of orphaned sums.

It runs in the process that has the engine open. The embedded engine is open in its collector only: there `agl-otel maintain` sends a
request (`POST /maintain` on the OTLP HTTP port, body {"since": Unix seconds of the last pass, 0 for none}). With a server it opens the
engine itself, so that it works the same for Python's collectors and the Go one. Both ways run this class, and the caller holds the lease
at the queue.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from aiohttp import web

from agl_otel.collector import orphans
from agl_otel.collector.adopt import Adoption
from agl_otel.collector.late_pass import LatePass
from agl_otel.errors import InUseError, UsageError
from agl_otel.net.bodies import json_of
from agl_otel.queue.client import QueueClient
from agl_otel.traces.opened import TraceStore

OVERLAP_SECONDS = 120.0  # overlap of two passes: rows become visible some time after their receipt


class Maintenance:
    """Runs passes over one store.

    `adopt_after`: how long a trace is quiet before it is adopted, in seconds; None: traces are not adopted (policy.py). `clock` returns
    Unix seconds.
    """

    def __init__(
        self, traces: TraceStore, queue: QueueClient, *, adopt_after: float | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._traces = traces
        self._late = LatePass(traces, queue)
        self._adoption = Adoption(self._late, queue, quiet_seconds=adopt_after) if adopt_after is not None else None
        self._clock = clock
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """End a running pass, and wait for its current query."""
        await self._late.close()

    def counts(self) -> dict[str, int]:
        """Spans and logs copied, ambiguous evaluations and traces adopted since the start."""
        adopted = self._adoption.counts["adopted"] if self._adoption else 0
        return {**{name: self._late.counts[name] for name in ("spans", "logs", "ambiguous")}, "adopted": adopted}

    async def run(self, since: float) -> dict[str, float]:
        """Run one pass over what was received since the pass that began at `since` (Unix seconds; 0: over everything).

        Returns what it copied and adopted, and when it began: the `since` of the next pass. Raises InUseError while a pass is running,
        ClickHouseError and UnavailableError if a store does not respond; what was done until then stays done.
        """
        if self._turn.locked():
            raise InUseError("a late pass is running already: wait for its end")
        async with self._turn:
            began = self._clock()
            before = self.counts()
            since_ms = max(0, int((since - OVERLAP_SECONDS) * 1000))
            now_ms = int(began * 1000)
            unidentified = await self._late.run(since_ms, now_ms)
            if self._adoption is not None:
                await self._adoption.run(since_ms, now_ms, unidentified=unidentified)
            if not since:
                await asyncio.to_thread(self._forget_orphans)
            return {**{name: count - before[name] for name, count in self.counts().items()}, "began": began}

    def _forget_orphans(self) -> None:
        orphans.forget(self._traces, (orphans.SERVICES, orphans.ROLLOUTS))

    async def handle(self, request: web.Request) -> web.Response:
        """POST /maintain."""
        try:
            since = float((await json_of(request))["since"])
        except (ValueError, TypeError, KeyError, json.JSONDecodeError):
            raise UsageError('POST /maintain takes {"since": Unix seconds of the last pass, 0 for none}') from None
        return web.json_response(await self.run(since))
