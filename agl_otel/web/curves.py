"""Cache of runs' curves: reading a run of 100,000 rollouts takes about a second.

A cached curve is returned at once; if it may be out of date, it is refreshed in the background (stale-while-revalidate).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Final, NamedTuple

from agl_otel.errors import AglError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.store import Store
from agl_otel.traces.figures import Curve, curve_of
from agl_otel.types import Run

KEPT: Final = 64
FRESH_SECONDS: Final = 2.0
SETTLED_SECONDS: Final = 30.0  # after the last rollout's end, because late spans and rewards may still arrive
_log = logging.getLogger(__name__)


class _Read(NamedTuple):
    curve: Curve
    run: Run
    at: float


class Curves:
    """Curves of the KEPT most recently read runs. Not thread-safe: use it in one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: OrderedDict[str, _Read] = OrderedDict()
        self._reading: dict[str, asyncio.Task[_Read]] = {}

    async def of(self, run: Run) -> tuple[Curve, float]:
        """Return the curve and its age in seconds. Raises UnavailableError, QueryError."""
        known = self._read.get(run.run_id)
        if known is None:
            known = await asyncio.shield(self._refresh(run))
        elif self._may_be_stale(known, run):
            self._refresh(run)
        return known.curve, time.time() - known.at

    def _may_be_stale(self, known: _Read, run: Run) -> bool:
        settled = known.run == run and known.at > (run.end_time or run.start_time) + SETTLED_SECONDS
        return not settled and time.time() - known.at > FRESH_SECONDS

    def _refresh(self, run: Run) -> asyncio.Task[_Read]:
        if run.run_id not in self._reading:
            task = self._reading[run.run_id] = asyncio.create_task(self._read_curve(run))
            task.add_done_callback(lambda done: self._on_done(run.run_id, done))
        return self._reading[run.run_id]

    def _on_done(self, run_id: str, task: asyncio.Task[_Read]) -> None:
        del self._reading[run_id]
        if not task.cancelled() and isinstance(error := task.exception(), AglError):
            _log.warning("the curve of run %r cannot be read now: %s", run_id, error)

    async def _read_curve(self, run: Run) -> _Read:
        began = time.time()
        members = await self._store.queue.query_run_members(run.run_id)
        table = await self._store.reader.run_figures(members.rollout_ids)
        read = _Read(await asyncio.to_thread(curve_of, members, table, frozenset(FINISHED)), run, began)
        self._read[run.run_id] = read
        self._read.move_to_end(run.run_id)
        while len(self._read) > KEPT:
            self._read.popitem(last=False)
        return read
