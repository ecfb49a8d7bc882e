"""How many items a request may have, whatever their size: of two bytes each, a message of 3 MB held 1.5 million rollouts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, TypeVar

from agl_otel.errors import UsageError

T = TypeVar("T")
MAX_ITEMS: Final = 100_000
"""In a list of a request that changes something: one transaction, which all others wait for; of rollouts it takes two seconds."""
MAX_IDS: Final = 1_000_000
"""In a list of a query or a wait, which nobody waits for; new ids of so many fill half of the largest message."""

_READING: Final = ("Stream", "Query", "Wait")


def check_items(call: str, request: Any) -> None:
    """Raise UsageError where a list of this request has more items than one of this call may have."""
    _check(request, MAX_IDS if call.startswith(_READING) else MAX_ITEMS)


def _check(request: Any, most: int) -> None:
    for field, value in request.ListFields():
        if isinstance(value, Collection) and not isinstance(value, str | bytes):
            if len(value) > most:  # pyright: ignore[reportUnknownArgumentType] - of whatever
                raise UsageError(
                    f"{field.name} has {len(value)} items, and {most} is the most for one message: send them in several"  # pyright: ignore[reportUnknownArgumentType]
                )
        elif field.message_type is not None:
            _check(value, most)


def by_the_message(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """`items` in parts of at most MAX_ITEMS, in order; one part at least."""
    for start in range(0, max(len(items), 1), MAX_ITEMS):
        yield items[start : start + MAX_ITEMS]
