"""The held-out tasks: questions that no user asks, in the form of those that are made of traffic."""

from __future__ import annotations

HELD_OUT = (1, 4, 6, 7, 9)


def wanted(digit: int) -> str:
    """Return the answer that users want."""
    return str((digit + 1) % 10)


def val() -> list[dict[str, str]]:
    return [{"input": str(digit), "expected": wanted(digit)} for digit in HELD_OUT]
