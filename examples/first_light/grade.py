"""How good an answer is: 1.0 where it is what the task expects, 0.0 otherwise."""

from typing import Any


def grade(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["expected"])
