"""Queries and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

from agl_otel.types.rollouts import RolloutMode, RolloutStatus

T_co = TypeVar("T_co", covariant=True)
SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]


@dataclass(frozen=True, kw_only=True)
class RolloutQuery:
    """A filter of rollouts, and a page of them; by default all, in the order of their creation."""

    status_in: Sequence[RolloutStatus] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: Sequence[RolloutMode] | None = None
    run: str | None = None
    """The rollout's `metadata.run`, else its resources_id."""
    ended_before: float | None = None
    """Unix seconds; selects rollouts finished before then, regardless of `filter_logic`."""
    input_contains: str | None = None
    """A literal text; the inputs of the latest 100,000 rollouts are searched."""
    output_contains: str | None = None
    """A text in the last model reply of the latest attempt, required regardless of `filter_logic`. Only a store can search replies: it
    searches the first 500 rollouts that match everything else, and sets `searched` of the result if there are more."""
    attempts_from: int = 0
    """The least number of attempts."""
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    """Below 0: all."""
    offset: int = 0


class RolloutConditions(TypedDict, total=False):
    """The fields of RolloutQuery as keyword arguments."""

    status_in: Sequence[RolloutStatus] | None
    rollout_id_in: Sequence[str] | None
    rollout_id_contains: str | None
    mode_in: Sequence[RolloutMode] | None
    run: str | None
    ended_before: float | None
    input_contains: str | None
    output_contains: str | None
    attempts_from: int
    filter_logic: FilterLogic
    sort_by: str | None
    sort_order: SortOrder
    limit: int
    offset: int


class PaginatedResult(Sequence[T_co], Generic[T_co]):
    """One page of a query; `total` counts the matches before paging. Acts as a sequence of its items.

    `searched` is how many were searched if not all were, so that there may be more matches; None: all were.
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
    """Conditions on one field; all given ones must hold."""

    exact: Any
    within: Sequence[Any]
    """One of these."""
    contains: str
    """A substring."""


FilterOptions = Mapping[str, FilterField | Literal["and", "or"] | Mapping[str, FilterField]]
"""Conditions by field, joined by `_aggregate` ("and" by default); those under `_must` are always required."""


class SortOptions(TypedDict):
    """The field and the direction to sort by."""

    name: str
    order: Literal["asc", "desc"]
