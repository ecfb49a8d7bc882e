"""Reward 1.0 if the answer is the expected digit."""

from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["expected"])
