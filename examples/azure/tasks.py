"""Numbers, and the expected digit for each; the model is not told the rule."""

from __future__ import annotations


def train() -> list[dict[str, object]]:
    return [{"number": number, "expected": str((number + 1) % 10)} for number in range(100, 200, 9)]


def val() -> list[dict[str, object]]:
    return [{"number": number, "expected": str((number + 1) % 10)} for number in range(200, 216)]
