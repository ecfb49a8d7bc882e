"""Values that count how often they are compared: what takes quadratic time compares so often."""

from __future__ import annotations

from collections import Counter

COMPARED: Counter[str] = Counter()


class Text(str):
    """A text that counts."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        COMPARED["texts"] += 1
        return str.__eq__(self, other) is True

    __hash__ = str.__hash__


class Number(int):
    """An integer that counts."""

    def __eq__(self, other: object) -> bool:
        COMPARED["numbers"] += 1
        return int.__eq__(self, other) is True

    def __lt__(self, other: int) -> bool:
        COMPARED["numbers"] += 1
        return int.__lt__(self, other)

    def __ge__(self, other: int) -> bool:
        COMPARED["numbers"] += 1
        return int.__ge__(self, other)

    __hash__ = int.__hash__
