"""Counters, so that no question has to count rows: every operation says what it moved, and the engine writes the sums with its commit.

Runs are counted beside them (engine.RunTallies).

Names: `rollouts/STATUS/MODE` (MODE empty where there is none), `claimable` (could be claimed now), `attempts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

from agl_otel.queue import lifecycle
from agl_otel.queue.engine import Transaction
from agl_otel.queue.rows import RolloutRow
from agl_otel.types import RolloutStatus

ROLLOUTS: Final = "rollouts/"
CLAIMABLE: Final = "claimable"
ATTEMPTS: Final = "attempts"


@lru_cache(maxsize=256)  # there are 7 statuses and 3 modes
def _names(status: RolloutStatus, mode: str | None, placed: bool) -> tuple[str, ...]:
    """What a rollout counts as."""
    name = f"{ROLLOUTS}{status}/{mode or ''}"
    return (name, CLAIMABLE) if placed and status in lifecycle.QUEUED else (name,)


def moved(tx: Transaction, before: RolloutRow | None, after: RolloutRow | None) -> None:
    """A rollout changed; None where it was not there before, or is not there any more."""
    for row, change in ((before, -1), (after, 1)):
        for name in _names(row.status, row.mode, row.position is not None) if row is not None else ():
            tx.tallies[name] += change
        if row is not None:
            tx.runs.count(row, change)


def all_tallies(tx: Transaction) -> dict[str, int]:
    """How many there are of everything; what there is none of may be missing."""
    return {name: int(count) for name, count in tx.rows("tallies_all")}


def rollouts_by_status(tallies: dict[str, int]) -> dict[str, int]:
    """{status: rollouts}, without those that there are none of."""
    counted: dict[str, int] = {}
    for status, _, count in _split(tallies.items()):
        counted[status] = counted.get(status, 0) + count
    return {status: count for status, count in counted.items() if count}


def matching(tallies: dict[str, int], statuses: Collection[str], modes: Collection[str]) -> int:
    """How many rollouts have one of these statuses and one of these modes; empty means any."""
    return sum(
        count for status, mode, count in _split(tallies.items()) if (not statuses or status in statuses) and (not modes or mode in modes)
    )


def _split(tallies: Iterable[tuple[str, int]]) -> Iterable[tuple[str, str, int]]:
    for name, count in tallies:
        if name.startswith(ROLLOUTS):
            _, status, mode = name.split("/")
            yield status, mode, count
