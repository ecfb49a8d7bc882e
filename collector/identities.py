"""The identities of a request's items: what identification found for each span or log record. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple


class Identity(NamedTuple):
    """The result of identification for one span, log record or data point."""

    rollout_id: str = ""
    attempt_id: str = ""
    sequence: int | None = None
    """The explicit sequence number, if any."""
    reason: str = ""
    """Why it is refused; empty if it is accepted."""


class Identities:
    """One identity per item, in the order of the request; equal ones in a row are held once, because most requests are of one attempt."""

    __slots__ = ("_count", "runs")

    def __init__(self, runs: Iterable[tuple[int, Identity]] = ()) -> None:
        self.runs: list[tuple[int, Identity]] = []
        """(how many in a row, their identity)."""
        for count, identity in runs:
            if self.runs and self.runs[-1][1] == identity:
                count += self.runs.pop()[0]
            if count:
                self.runs.append((count, identity))
        self._count = sum(count for count, _ in self.runs)

    @classmethod
    def of(cls, each: Iterable[Identity]) -> Identities:
        """Gather the identities of single items."""
        return cls((sum(1 for _ in run), identity) for identity, run in groupby(each))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Identity]:
        for count, identity in self.runs:
            for _ in range(count):
                yield identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identities) and self.runs == other.runs

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as for any mutable class

    def __repr__(self) -> str:
        return f"Identities({self.runs!r})"

    @property
    def taken(self) -> int:
        """Number of items that are not refused."""
        return sum(count for count, identity in self.runs if not identity.reason)

    def map(self, change: Callable[[Identity], Identity]) -> Identities:
        """Return the identities changed, each run at once."""
        return Identities((count, change(identity)) for count, identity in self.runs)

    def count(self, wanted: Callable[[Identity], object]) -> int:
        """Count the items with such an identity."""
        return sum(count for count, identity in self.runs if wanted(identity))
