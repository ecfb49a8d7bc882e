"""Limits on the number of items in a request, whatever their size: a message of 3 MB can have 1.5 million rollouts of two bytes each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from agl_otel.errors import UsageError

T = TypeVar("T")
MAX_ITEMS: Final = 100_000
"""Items in a list of a request that writes: one transaction, which blocks all others; for rollouts it takes two seconds."""
MAX_IDS: Final = 1_000_000
"""Items in a list of a query or a wait, which block nothing; that many ids fill half of the largest message."""

_READING: Final = ("Stream", "Query", "Wait")


def check_items(call: str, request: Any) -> None:
    """Raise UsageError if a list of this request has more items than this call allows."""
    _check(request, MAX_IDS if call.startswith(_READING) else MAX_ITEMS)


def _check(request: Any, most: int) -> None:
    for field, value in request.ListFields():
        if isinstance(value, Collection) and not isinstance(value, str | bytes):
            count = len(cast("Collection[Any]", value))
            if count > most:
                raise UsageError(f"{field.name} has {count} items, and {most} is the most for one message: send them in several")
        elif field.message_type is not None:
            _check(value, most)


def in_messages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split `items`, in order, into parts of at most MAX_ITEMS; at least one part."""
    for start in range(0, max(len(items), 1), MAX_ITEMS):
        yield items[start : start + MAX_ITEMS]
