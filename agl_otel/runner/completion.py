"""Complete attempts that have ended: close them at the proxies, seal and flush, store what was printed, report to the queue.

Attempts go in batches, as in group commit: while one batch is under way the next gathers, and takes whatever waits; there is no fixed
sleep. So a slow disk makes batches larger, not the queue of attempts longer. A result is given up only when the runner is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import aiohttp

from agl_otel.errors import AglError, FencedError, UnavailableError
from agl_otel.net.tls import connector
from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.runner.job import Job
from agl_otel.runner.output import LogExporter, Printed
from agl_otel.service.retry import Backoff, retry
from agl_otel.telemetry.setup import Telemetry
from agl_otel.types import AttemptLedger, AttemptStatus

CLOSE_TIMEOUT_SECONDS: Final = 10.0  # a proxy flushes to the collector before it answers
CLOSE_TRIES: Final = 3
CREDIBLE_SPANS: Final = 100_000_000  # of one process in one attempt; agents write their own counts, and one beyond is not shown
SEAL_RETRY_SECONDS: Final = 30.0  # how long a collector may be away before attempts fail because their rewards cannot be stored
_BACKOFF: Final = Backoff(0.1, 5.0)
_log = logging.getLogger(__name__)
T = TypeVar("T")
Key = tuple[str, str]
Seals = dict[Key, dict[str, int]]


@dataclass(slots=True)
class Ended:
    """An attempt whose agent has ended."""

    job: Job
    status: AttemptStatus
    error: str | None = None
    report: bool = True
    """Whether the queue waits for it; not where it ended the attempt itself (cancelled, timed out, superseded)."""
    seconds: float = 0.0
    """How long the agent ran."""
    spans: int | None = None
    """How many spans were made for it, of the runner, the proxies and its processes; None where its processes are not counted here."""
    reward: float | None = None
    """The last primary reward that this process emitted."""
    ledger: AttemptLedger | None = None
    """What its processes did; filled in at its end."""


@dataclass(slots=True)
class Completion:
    """The pipeline of attempts that have ended. `run` is one task for the runner's life; `put` never waits."""

    queue: QueueClient
    telemetry: Telemetry
    logs: LogExporter
    proxies: Callable[[], Awaitable[Sequence[str]]]
    """The http address of every proxy that there is now."""
    counts: Counter[str]
    on_ended: Callable[[Ended], None]
    """Called when an attempt is done with: completed, or given up."""
    token: str = field(default="", repr=False)
    pending: dict[str, Ended] = field(default_factory=dict[str, Ended])
    """What has ended and is not completed yet, by attempt id: heartbeats go on for these."""
    _waiting: list[Ended] = field(default_factory=list[Ended])
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, ended: Ended) -> None:
        """Take an attempt that has ended."""
        self.pending[ended.job.attempt_id] = ended
        self._waiting.append(ended)
        self._idle.clear()
        self._arrived.set()

    async def run(self) -> None:
        """Bring attempts to their end until cancelled."""
        async with closing_session() as session:
            while True:
                if not self._waiting:
                    self._idle.set()
                await self._arrived.wait()
                self._arrived.clear()
                batch, self._waiting = self._waiting, []
                await self._end_all(session, batch)
                for ended in batch:
                    self.pending.pop(ended.job.attempt_id, None)
                    self.on_ended(ended)

    async def drained(self) -> None:
        """Wait until everything that was put is done with."""
        if self.pending:
            await self._idle.wait()

    async def _end_all(self, session: aiohttp.ClientSession, batch: Sequence[Ended]) -> None:
        """Bring these to their end: together, where one spoils that each by itself, and that one as failed."""
        try:
            await self._end(session, batch)
        except Exception as error:  # noqa: BLE001 - the boundary: one bad attempt stops neither the others nor the runner
            if len(batch) > 1:
                for ended in batch:
                    await self._end_all(session, [ended])
                return
            [ended] = batch
            self.counts["ending_errors"] += 1
            _log.exception("attempt %s could not be completed", ended.job.attempt_id)
            ended.status, ended.error = "failed", f"its runner could not complete it: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # what can be said without what failed
                await self._complete([_update(ended, {})])

    async def _end(self, session: aiohttp.ClientSession, batch: Sequence[Ended]) -> None:
        keys = [ended.job.key for ended in batch]
        by_proxies, own, *_ = await asyncio.gather(self.close(session, keys), self._seal(keys), self._store_output(batch))
        await self._read_ledgers(batch)  # after the seals: what is read there may be forgotten here
        if own is None:
            for ended in batch:
                if ended.status == "succeeded":
                    ended.status, ended.error = "failed", "its reward and spans could not be stored: the collector is away"
        seals = {key: {**by_proxies.get(key, {}), **(own or {}).get(key, {})} for key in keys}
        await self._complete([_update(e, seals[e.job.key]) for e in batch])
        for ended in batch:
            if ended.job.ledgers is not None:
                await asyncio.to_thread(ended.job.ledgers.forget, ended.job.key)
            ended.spans, ended.reward = _spans_of(ended.ledger, seals[ended.job.key]), self.telemetry.reward(ended.job.key)
            self.telemetry.forget(*ended.job.key)

    async def close(self, session: aiohttp.ClientSession, keys: Sequence[Key]) -> Seals:
        """Close the attempts at every proxy; {key: {marker: spans}}. One that stays away is counted, and the verdict will show it."""
        seals: Seals = {}
        for counts in await asyncio.gather(*(self._close_at(session, proxy, keys) for proxy in await self.proxies())):
            for key, of_markers in counts.items():
                seals.setdefault(key, {}).update(of_markers)
        return seals

    async def _close_at(self, session: aiohttp.ClientSession, proxy: str, keys: Sequence[Key]) -> Seals:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        closed: Seals = {}

        async def close() -> None:
            left = [key for key in keys if key not in closed]
            try:
                async with session.post(f"{proxy.rstrip('/')}/close", json={"attempts": left}, headers=headers) as response:
                    response.raise_for_status()
                    answer = await response.json()
                    for key, counts in zip(left, answer["counts"], strict=True):
                        if counts is not None:  # or what a dead proxy left of it is not stored yet
                            closed[key] = {str(marker): int(spans) for marker, spans in counts.items()}
            except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError, AttributeError) as error:
                raise UnavailableError(f"proxy {proxy} did not close {len(left)} attempts: {error!r}") from error
            if len(closed) < len(keys):
                raise UnavailableError(f"proxy {proxy} could not store all of {len(keys) - len(closed)} attempts yet")

        try:
            await persist(close, tries=CLOSE_TRIES)
        except UnavailableError as error:
            self.counts["close_errors"] += 1
            _log.warning("%s; they may count as incomplete", error)
        return closed

    async def _seal(self, keys: Sequence[Key]) -> Seals | None:
        """Seal and flush what this process ended for the attempts; None where the collector stayed away."""
        try:
            return await persist(lambda: asyncio.to_thread(self.telemetry.seal, keys), seconds=SEAL_RETRY_SECONDS)
        except UnavailableError as error:
            self.counts["seal_errors"] += 1
            _log.error("%d attempts fail because their spans could not be stored: %s", len(keys), error)
            return None

    async def _store_output(self, batch: Sequence[Ended]) -> None:
        printed = [Printed(*e.job.key, e.job.traceparent, e.job.captures) for e in batch if e.job.captures]
        if not printed:
            return
        try:
            await persist(lambda: self.logs.export(printed), tries=CLOSE_TRIES)
        except AglError as error:
            self.counts["output_errors"] += 1
            _log.warning("the output of %d attempts was not stored: %s", len(printed), error)

    async def _read_ledgers(self, batch: Sequence[Ended]) -> None:
        """What the processes of each attempt have done: they are gone, or what they begin from now on is late.

        For this one the attempt ends here: what agents that are functions have left open is abandoned.
        """
        self.telemetry.over([ended.job.key for ended in batch])
        for ended in batch:
            if ended.job.ledgers is not None:
                ended.ledger = await asyncio.to_thread(ended.job.ledgers.read, ended.job.key)
                ended.ledger.answered, ended.ledger.over = ended.job.answered, ended.job.over

    async def _complete(self, updates: Sequence[AttemptUpdate]) -> None:
        """Tell the queue, which takes or refuses each by itself. A queue that is away is asked until it is back."""
        if not updates:
            return
        outcomes = await persist(lambda: self.queue.report(updates))
        for update, error in zip(updates, outcomes, strict=True):
            if error is not None:
                self.counts["fenced" if isinstance(error, FencedError) else "refused"] += 1
                _log.warning("the result of attempt %s was dropped: %s", update.attempt_id, error)


def closing_session() -> aiohttp.ClientSession:
    """For `Completion.close`."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CLOSE_TIMEOUT_SECONDS), connector=connector())


def _spans_of(ledger: AttemptLedger | None, seals: dict[str, int]) -> int | None:
    """How many spans were made for an attempt; None where those of its processes are not known, or one claims what cannot be."""
    processes = [record for record in ledger.processes if not record.runner] if ledger else []
    counts = {marker: each.begun for marker, each in ledger.answered.items()} if ledger else {}
    counts |= {record.marker: record.ended - record.dropped for record in processes}
    if ledger is not None and (ledger.problem is not None or not counts):
        return None
    counts |= seals
    return sum(counts.values()) if all(0 <= count <= CREDIBLE_SPANS for count in counts.values()) else None


def _update(ended: Ended, seals: dict[str, int]) -> AttemptUpdate:
    """Its result; only what is known of its processes where the queue ended the attempt itself."""
    job = ended.job
    known = AttemptUpdate(rollout_id=job.rollout_id, attempt_id=job.attempt_id, seals=seals, ledger=ended.ledger)
    return replace(known, status=ended.status, error=ended.error, token=job.rollout.token) if ended.report else known


async def persist(ask: Callable[[], Awaitable[T]], *, tries: int | None = None, seconds: float | None = None) -> T:
    """What `ask` answers; UnavailableError is tried again `tries` times or for `seconds` (both None: for ever), and logged once."""
    return await retry(ask, _BACKOFF, seconds=seconds, limit=tries, first_failure=lambda error: _log.info("trying again: %s", error))
