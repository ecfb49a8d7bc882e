"""Complete attempts that have ended: close them at the proxies, seal and flush, store their output, report to the queue.

Attempts are completed in batches, as in group commit: attempts that end while a batch is in flight form the next one, without a fixed
delay. A slow disk therefore makes batches larger, not the backlog longer. Results are retried for as long as the runner lives.
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
from agl_otel.runner.output import AttemptOutput, LogExporter
from agl_otel.service.retry import Backoff, retry
from agl_otel.telemetry.setup import Telemetry
from agl_otel.text import error_text
from agl_otel.types import AttemptLedger, AttemptStatus

CLOSE_TIMEOUT_SECONDS: Final = 10.0  # a proxy flushes to the collector before it answers
CLOSE_TRIES: Final = 3
CREDIBLE_SPANS: Final = 100_000_000  # per process and attempt; counts come from the agent's processes, and larger ones are ignored
SEAL_RETRY_SECONDS: Final = 30.0  # collector outage after which attempts fail because their rewards cannot be stored
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
    """Whether to report the status; False where the queue ended the attempt itself (cancelled, timed out, superseded)."""
    seconds: float = 0.0
    """How long the agent ran."""
    spans: int | None = None
    """Spans created for it by the runner, the proxies and its processes; None where its processes are not counted here."""
    reward: float | None = None
    """The last primary reward that this process emitted."""
    ledger: AttemptLedger | None = None
    """Span counts of its processes; set on completion."""


@dataclass(slots=True)
class Completion:
    """The pipeline that completes ended attempts. `run` is one task for the runner's lifetime; `put` never blocks."""

    queue: QueueClient
    telemetry: Telemetry
    logs: LogExporter
    proxies: Callable[[], Awaitable[Sequence[str]]]
    """Returns the HTTP addresses of all current proxies."""
    counts: Counter[str]
    on_ended: Callable[[Ended], None]
    """Called when an attempt was completed or given up."""
    token: str = field(default="", repr=False)
    pending: dict[str, Ended] = field(default_factory=dict[str, Ended])
    """Attempts that have ended but are not completed, by attempt id; the runner keeps sending their heartbeats."""
    _waiting: list[Ended] = field(default_factory=list[Ended])
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, ended: Ended) -> None:
        """Queue an attempt that has ended for completion."""
        self.pending[ended.job.attempt_id] = ended
        self._waiting.append(ended)
        self._idle.clear()
        self._arrived.set()

    async def run(self) -> None:
        """Complete attempts until cancelled."""
        async with proxy_session() as session:
            while True:
                if not self._waiting:
                    self._idle.set()
                await self._arrived.wait()
                self._arrived.clear()
                batch, self._waiting = self._waiting, []
                await self._complete_all(session, batch)
                for ended in batch:
                    self.pending.pop(ended.job.attempt_id, None)
                    self.on_ended(ended)

    async def drained(self) -> None:
        """Wait until every queued attempt was completed or given up."""
        if self.pending:
            await self._idle.wait()

    async def _complete_all(self, session: aiohttp.ClientSession, batch: Sequence[Ended]) -> None:
        """Complete a batch; if that raises, complete its attempts one by one and fail those that raise again."""
        try:
            await self._complete(session, batch)
        except Exception as error:  # noqa: BLE001 - boundary: a bad attempt must stop neither the others nor the runner
            if len(batch) > 1:
                for ended in batch:
                    await self._complete_all(session, [ended])
                return
            [ended] = batch
            self.counts["ending_errors"] += 1
            _log.exception("attempt %s could not be completed", ended.job.attempt_id)
            ended.status, ended.error = "failed", f"its runner could not complete it: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the first failure is logged; this report is best effort
                await self._report([_update(ended, {})])

    async def _complete(self, session: aiohttp.ClientSession, batch: Sequence[Ended]) -> None:
        keys = [ended.job.key for ended in batch]
        by_proxies, by_runner, *_ = await asyncio.gather(self.close(session, keys), self._seal(keys), self._store_output(batch))
        await self._read_ledgers(batch)  # after sealing, because it discards open spans of these attempts
        if by_runner is None:
            for ended in batch:
                if ended.status == "succeeded":
                    ended.status, ended.error = "failed", "its reward and spans could not be stored: the collector is unavailable"
        seals = {key: {**by_proxies.get(key, {}), **(by_runner or {}).get(key, {})} for key in keys}
        await self._report([_update(e, seals[e.job.key]) for e in batch])
        for ended in batch:
            if ended.job.ledgers is not None:
                await asyncio.to_thread(ended.job.ledgers.remove, ended.job.key)
            ended.spans, ended.reward = _span_count(ended.ledger, seals[ended.job.key]), self.telemetry.reward(ended.job.key)
            self.telemetry.forget(*ended.job.key)

    async def close(self, session: aiohttp.ClientSession, keys: Sequence[Key]) -> Seals:
        """Close the attempts at every proxy; return {key: {process marker: spans}}.

        An unreachable proxy counts as a close error; its seals are missing, which makes the attempts' verdicts incomplete.
        """
        seals: Seals = {}
        for closed in await asyncio.gather(*(self._close_at(session, proxy, keys) for proxy in await self.proxies())):
            for key, counts in closed.items():
                seals.setdefault(key, {}).update(counts)
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
                        if counts is not None:  # None: spans in the journal of a dead proxy are not stored yet
                            closed[key] = {str(marker): int(spans) for marker, spans in counts.items()}
            except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError, AttributeError) as error:
                raise UnavailableError(f"proxy {proxy} did not close {len(left)} attempts: {error_text(error)}") from error
            if len(closed) < len(keys):
                raise UnavailableError(f"proxy {proxy} could not store all of {len(keys) - len(closed)} attempts yet")

        try:
            await retry_unavailable(close, tries=CLOSE_TRIES)
        except UnavailableError as error:
            self.counts["close_errors"] += 1
            _log.warning("%s; they may count as incomplete", error)
        return closed

    async def _seal(self, keys: Sequence[Key]) -> Seals | None:
        """Seal the attempts in this process and flush their spans; None where the collector remained unavailable."""
        try:
            return await retry_unavailable(lambda: asyncio.to_thread(self.telemetry.seal, keys), seconds=SEAL_RETRY_SECONDS)
        except UnavailableError as error:
            self.counts["seal_errors"] += 1
            _log.error("%d attempts fail because their spans could not be stored: %s", len(keys), error)
            return None

    async def _store_output(self, batch: Sequence[Ended]) -> None:
        outputs = [AttemptOutput(*e.job.key, e.job.traceparent, e.job.captures) for e in batch if e.job.captures]
        if not outputs:
            return
        try:
            await retry_unavailable(lambda: self.logs.export(outputs), tries=CLOSE_TRIES)
        except AglError as error:
            self.counts["output_errors"] += 1
            _log.warning("the output of %d attempts was not stored: %s", len(outputs), error)

    async def _read_ledgers(self, batch: Sequence[Ended]) -> None:
        """Read the span counts of each attempt's processes; spans that they start from now on are late.

        Spans that function agents have left open in this process are abandoned.
        """
        self.telemetry.end_attempts([ended.job.key for ended in batch])
        for ended in batch:
            if ended.job.ledgers is not None:
                ended.ledger = await asyncio.to_thread(ended.job.ledgers.read, ended.job.key)
                ended.ledger.answered, ended.ledger.over = ended.job.answered, ended.job.over

    async def _report(self, updates: Sequence[AttemptUpdate]) -> None:
        """Report to the queue, which accepts or refuses each update; retried while the queue is unavailable."""
        if not updates:
            return
        outcomes = await retry_unavailable(lambda: self.queue.report(updates))
        for update, error in zip(updates, outcomes, strict=True):
            if error is not None:
                self.counts["fenced" if isinstance(error, FencedError) else "refused"] += 1
                _log.warning("the result of attempt %s was dropped: %s", update.attempt_id, error)


def proxy_session() -> aiohttp.ClientSession:
    """Open the HTTP session that `Completion.close` takes."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CLOSE_TIMEOUT_SECONDS), connector=connector())


def _span_count(ledger: AttemptLedger | None, seals: dict[str, int]) -> int | None:
    """Count the spans created for an attempt; None where its processes' counts are unknown or one is beyond CREDIBLE_SPANS."""
    processes = [record for record in ledger.processes if not record.runner] if ledger else []
    counts = {marker: each.begun for marker, each in ledger.answered.items()} if ledger else {}
    counts |= {record.marker: record.ended - record.dropped for record in processes}
    if ledger is not None and (ledger.problem is not None or not counts):
        return None
    counts |= seals
    return sum(counts.values()) if all(0 <= count <= CREDIBLE_SPANS for count in counts.values()) else None


def _update(ended: Ended, seals: dict[str, int]) -> AttemptUpdate:
    """Build the report to the queue: seals and ledger, and the status unless the queue ended the attempt itself."""
    job = ended.job
    update = AttemptUpdate(rollout_id=job.rollout_id, attempt_id=job.attempt_id, seals=seals, ledger=ended.ledger)
    return replace(update, status=ended.status, error=ended.error, token=job.rollout.token) if ended.report else update


async def retry_unavailable(call: Callable[[], Awaitable[T]], *, tries: int | None = None, seconds: float | None = None) -> T:
    """Await `call()`, retrying on UnavailableError up to `tries` times or for `seconds` (both None: forever); the first is logged."""
    return await retry(call, _BACKOFF, seconds=seconds, limit=tries, first_failure=lambda error: _log.info("retrying: %s", error))
