"""What queries are made of and what they answer."""

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
    """Which rollouts, and which page of them: all, in the order of their creation, where nothing is given."""

    status_in: Sequence[RolloutStatus] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: Sequence[RolloutMode] | None = None
    run: str | None = None
    """What `metadata.run` names, else the set of resources."""
    ended_before: float | None = None
    """Unix seconds; leaves out those that are not finished, or finished later, whatever `filter_logic` says."""
    input_contains: str | None = None
    """A text as it is written; inputs of the latest 100,000 rollouts are searched."""
    output_contains: str | None = None
    """A text in the last reply of a model in the latest attempt, which must hold whatever `filter_logic` says. Only a store knows
    replies: it searches the first 500 rollouts that match all else; `searched` of the answer is set where there are more."""
    attempts_from: int = 0
    """With so many attempts, or more."""
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    """Below 0: all."""
    offset: int = 0


class RolloutConditions(TypedDict, total=False):
    """The fields of RolloutQuery, as keywords."""

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
