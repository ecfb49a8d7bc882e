"""The engine interface: run one operation as one transaction. All logic is above it, in operations/.

An operation is a plain function of a Transaction. `write` runs it isolated and durably: when `write` returns, its effect survives
kill -9. An operation that raises has no effect. Its signals reach `subscribe`d callbacks after the commit, on the event loop, before
`write` returns; other services on the same store get them soon after.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from agl_otel.queue.rows import RolloutRow, Row
from agl_otel.queue.statements import Statements

T = TypeVar("T")
Params = Mapping[str, object]


@dataclass
class Signals:
    """The changes of a transaction that waiting calls need to know."""

    claimable: int = 0
    """How many rollouts became claimable."""
    settled: list[str] = field(default_factory=list[str])
    """Rollouts that were finished or deleted."""
    ended: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    """(status, mode or "unknown", seconds since its start) of each finished rollout; only for this service's metrics."""
    missed: bool = False
    """Signals may have been lost: Wait calls query their rollouts again. (The watchdog wakes claims.)"""

    def __bool__(self) -> bool:
        return bool(self.claimable or self.settled or self.missed)

    def add(self, other: Signals) -> None:
        """Merge `other` into this."""
        self.claimable += other.claimable
        self.settled += other.settled
        self.ended += other.ended
        self.missed |= other.missed


class Transaction(Protocol):
    """The interface through which an operation reads and writes."""

    statements: Statements
    signals: Signals
    tallies: Counter[str]
    """Changes of the counters (transitions.py); the engine writes them before the commit."""
    runs: RunTallies
    """Changes of the counters of each run."""

    def rows(self, name: str, params: Params = ...) -> list[tuple[Any, ...]]:
        """All rows of the named query."""
        ...

    def rows_of(self, sql: str, params: Params) -> list[tuple[Any, ...]]:
        """All rows of a query composed by Statements.paged."""
        ...

    def run(self, name: str, params: Params = ...) -> None:
        """Run the named statement, at the latest before the next one that returns rows."""
        ...

    def changed(self, name: str, params: Params = ...) -> int:
        """Run the named statement; return how many rows it changed."""
        ...

    def run_many(self, name: str, params: Sequence[Params] | Sequence[Row]) -> None:
        """Run the named statement once for each of `params`: rows of one table, or mappings with the same keys."""
        ...

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Block other transactions that name one of these keys until this one ends; to be called first in an operation."""
        ...

    def lock_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Lock these rollouts until the transaction ends; to be called before an operation changes several of them."""
        ...


Operation = Callable[[Transaction], T]
Record = Callable[[str, BaseException | None, float], None]
"""Called with "write" or "read", the error or None, and the seconds from the call to its result."""


class Engine(Protocol):
    """A transactional store of the queue's tables."""

    name: str
    where: str
    """The store's location for messages, without secrets."""

    def write(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run an operation that writes; it takes effect once or not at all, and durably when the future is done.

        Concurrent operations run in any order. The future raises what the operation raises, or UnavailableError. An operation may be run
        again from the start, so it must have no effect except through its transaction.
        """
        ...

    async def read(self, operation: Operation[T]) -> T:
        """Run an operation that only reads, on a consistent snapshot that includes every write that has returned."""
        ...

    def now(self) -> float:
        """Return Unix seconds by the clock that all services on this store share."""
        ...

    def subscribe(self, callback: Callable[[Signals], None]) -> None:
        """Call `callback` on the event loop with the signals of committed transactions."""
        ...

    def instrument(self, record: Record) -> None:
        """Call `record` on the event loop after each transaction."""
        ...

    async def close(self) -> None:
        """Finish operations in flight and release the store."""
        ...


class Instrumented:
    """Base of the engines: subscribers of signals, and the timing of transactions."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Signals], None]] = []
        self._record: Record | None = None

    def subscribe(self, callback: Callable[[Signals], None]) -> None:
        """Call `callback` on the event loop with the signals of committed transactions, here or in another service."""
        self._subscribers.append(callback)

    def instrument(self, record: Record) -> None:
        """Call `record` on the event loop after each transaction."""
        self._record = record

    def _timed(self, kind: str, future: asyncio.Future[T]) -> asyncio.Future[T]:
        if (record := self._record) is not None:
            began = perf_counter()
            future.add_done_callback(lambda done: record(kind, None if done.cancelled() else done.exception(), perf_counter() - began))
        return future

    def _signal(self, signals: Signals) -> None:
        for callback in self._subscribers:
            callback(signals)


def tally_changes(tallies: Counter[str]) -> list[dict[str, object]]:
    """Return the parameters of `tally_add`: changes other than zero, sorted, so that two transactions cannot deadlock."""
    return [{"name": name, "change": change} for name, change in sorted(tallies.items()) if change]


class RunTallies:
    """Changes of the counters of runs by one transaction."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.deleted = False
        """Whether rollouts were deleted: counters that reached zero still hold the names of their runs, until they are purged."""

    def count(self, row: RolloutRow, change: int) -> None:
        """Count a rollout that entered (1) or left (-1) its run, status and mode."""
        key = (row.run, row.status, row.mode or "")
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = {
                "run": key[0], "status": key[1], "mode": key[2], "rollouts": 0, "attempts": 0,
                "first_start": row.start_time, "last_end": row.end_time, "last_step": row.step,
            }  # fmt: skip
        elif change > 0:  # those of a rollout that leaves were counted when it entered
            if row.start_time < found["first_start"]:
                found["first_start"] = row.start_time
            if row.end_time is not None:
                found["last_end"] = _latest(found["last_end"], row.end_time)
            if row.step is not None:
                found["last_step"] = _latest(found["last_step"], row.step)
        found["rollouts"] += change
        found["attempts"] += change * row.attempt_count

    def changes(self) -> list[dict[str, Any]]:
        """Return the parameters of `run_tally_add`: changes other than zero, sorted (see tally_changes)."""
        return [found for _, found in sorted(self._found.items()) if found["rollouts"] or found["attempts"]]


def _latest(known: float | None, other: float | None) -> float | None:
    return known if other is None or (known is not None and known >= other) else other


def first(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The first row, or None."""
    return rows[0] if rows else None
