"""Runs one operation as one transaction: what an engine is. All logic is above it, in operations/.

An operation is a plain function of a Transaction. `write` runs it alone and durably: when `write` returns, its effect survives
kill -9. An operation that raises has no effect. What an operation signals reaches `subscribe`d callbacks after the commit, on the
event loop, before `write` returns; where several services share a store, the others get it soon after.
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
    """What a transaction changed that calls wait for."""

    claimable: int = 0
    """How many rollouts it made claimable."""
    settled: list[str] = field(default_factory=list[str])
    """Rollouts that it finished or deleted."""
    ended: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    """(status, mode or unknown, seconds since its start) of the rollouts that it finished; for this service's metrics alone."""
    missed: bool = False
    """Signals may have been lost: calls that wait for rollouts look at them. (The watchdog looks at what is claimable.)"""

    def __bool__(self) -> bool:
        return bool(self.claimable or self.settled or self.missed)

    def add(self, other: Signals) -> None:
        """Take over what `other` holds."""
        self.claimable += other.claimable
        self.settled += other.settled
        self.ended += other.ended
        self.missed |= other.missed


class Transaction(Protocol):
    """What an operation may do."""

    statements: Statements
    signals: Signals
    tallies: Counter[str]
    """What the operation changed of the counters (operations/tallies.py); the engine writes it before the commit."""
    runs: RunTallies
    """The same of each run's."""

    def rows(self, name: str, params: Params = ...) -> list[tuple[Any, ...]]:
        """All rows of the named query."""
        ...

    def rows_of(self, sql: str, params: Params) -> list[tuple[Any, ...]]:
        """All rows of a query that Statements.paged composed."""
        ...

    def run(self, name: str, params: Params = ...) -> None:
        """Run the named statement, at the latest before the next one that has an answer."""
        ...

    def changed(self, name: str, params: Params = ...) -> int:
        """Run the named statement; answers how many rows it changed."""
        ...

    def run_many(self, name: str, params: Sequence[Params] | Sequence[Row]) -> None:
        """Run the named statement once for each; all are rows of one table, or name the same parameters."""
        ...

    def alone(self, keys: Sequence[str]) -> None:
        """Keep other transactions that name one of these keys waiting until this one ends; the first thing that an operation does."""
        ...

    def hold(self, rollout_ids: Sequence[str]) -> None:
        """Keep all others from changing these rollouts until the transaction ends; before an operation changes several of them."""
        ...


Operation = Callable[[Transaction], T]
Record = Callable[[str, BaseException | None, float], None]
"""Takes "write" or "read", the error where there was one, and the seconds from the call until the answer."""


class Engine(Protocol):
    """A transactional store of the queue's tables."""

    name: str
    where: str
    """Where the store is, for people: without secrets."""

    def write(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run an operation that changes something, once or (with effect) not at all; durable when the future is done.

        Of two operations that are under way at once either may be first. The future gets what the operation raises, or UnavailableError. An
        operation may be run again from the start, so it has no effect but through its transaction.
        """
        ...

    async def read(self, operation: Operation[T]) -> T:
        """Run an operation that only reads, on one consistent state that contains every write that has returned."""
        ...

    def now(self) -> float:
        """Unix seconds by the one clock that all services on this store go by."""
        ...

    def subscribe(self, callback: Callable[[Signals], None]) -> None:
        """Call `callback` on the event loop with the signals of committed transactions."""
        ...

    def instrument(self, record: Record) -> None:
        """Call `record` on the event loop after each transaction."""
        ...

    async def close(self) -> None:
        """Finish what was begun and let go of the store."""
        ...


class Instrumented:
    """What engines have in common: subscribers of signals, and the time that transactions take."""

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
    """The parameters of `tally_add`: what is not zero, in one order for all, so that two transactions do not wait for each other."""
    return [{"name": name, "change": change} for name, change in sorted(tallies.items()) if change]


class RunTallies:
    """What a transaction changed of the counters of runs."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.deleted = False
        """Whether rollouts were deleted: counters that came to nothing hold the names of their runs until the next sweep."""

    def count(self, row: RolloutRow, change: int) -> None:
        """A rollout came (1) to a run, status and mode, or left (-1)."""
        key = (row.run, row.status, row.mode or "")
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = {
                "run": key[0], "status": key[1], "mode": key[2], "rollouts": 0, "attempts": 0,
                "first_start": row.start_time, "last_end": row.end_time, "last_step": row.step,
            }  # fmt: skip
        else:
            found["first_start"] = min(found["first_start"], row.start_time)
            found["last_end"] = _latest(found["last_end"], row.end_time)
            found["last_step"] = _latest(found["last_step"], row.step)
        found["rollouts"] += change
        found["attempts"] += change * row.attempt_count

    def changes(self) -> list[dict[str, Any]]:
        """The parameters of `run_tally_add`: what is not zero, in one order for all (see tally_changes)."""
        return [found for _, found in sorted(self._found.items()) if found["rollouts"] or found["attempts"]]


def _latest(known: float | None, other: float | None) -> float | None:
    return known if other is None or (known is not None and known >= other) else other


def first(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The first row, or None."""
    return rows[0] if rows else None
