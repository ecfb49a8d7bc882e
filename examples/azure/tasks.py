"""Numbers, and the digit that is wanted for each: nobody tells the model which rule that is."""

from __future__ import annotations


def train() -> list[dict[str, object]]:
    return [{"number": number, "expected": str((number + 1) % 10)} for number in range(100, 200, 9)]


def val() -> list[dict[str, object]]:
    return [{"number": number, "expected": str((number + 1) % 10)} for number in range(200, 216)]
