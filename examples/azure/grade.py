"""1.0 where the answer is the digit that is wanted."""

from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["expected"])
