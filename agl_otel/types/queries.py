"""What queries are made of and what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, TypeVar

T_co = TypeVar("T_co", covariant=True)


class PaginatedResult(Sequence[T_co], Generic[T_co]):
    """One page of a query; `total` counts the matches before paging. Acts as a sequence of its items.

    `searched` says how many were looked into where that was not all of them: there may be more matches. None: all were.
    """

    def __init__(self, items: Sequence[T_co], limit: int = -1, offset: int = 0, total: int = -1, *, searched: int | None = None) -> None:
        self.items = items
        self.limit = limit
        self.offset = offset
        self.total = len(items) if total < 0 else total
        self.searched = searched

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.items)

    def __repr__(self) -> str:
        return f"PaginatedResult({len(self.items)} of {self.total}, offset={self.offset})"


class FilterField(TypedDict, total=False):
    """A condition on one field; what is given of it must hold."""

    exact: Any
    within: Sequence[Any]
    """One of these."""
    contains: str
    """A part of the text."""


FilterOptions = Mapping[str, FilterField | Literal["and", "or"] | Mapping[str, FilterField]]
"""Conditions by field; `_aggregate` joins them ("and" unless told otherwise), and those under `_must` hold in any case."""


class SortOptions(TypedDict):
    """By which field, and which way."""

    name: str
    order: Literal["asc", "desc"]
