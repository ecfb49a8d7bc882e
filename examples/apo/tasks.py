"""The tasks: a digit, and the expected answer. `target` is the operation that the agent must find out."""

from __future__ import annotations

from typing import Any

from words import OPERATIONS

TRAIN = (0, 2, 3, 5, 8)
VAL = (1, 4, 6, 7, 9)


def train(target: str = "next") -> list[dict[str, Any]]:
    return [{"digit": digit, "wanted": str(OPERATIONS[target](digit))} for digit in TRAIN]


def val(target: str = "next") -> list[dict[str, Any]]:
    return [{"digit": digit, "wanted": str(OPERATIONS[target](digit))} for digit in VAL]
