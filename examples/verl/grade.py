"""How good the two answers are: each is right where it is one more than the last digit it was asked about."""

from typing import Any


def grade(task: dict[str, Any], answers: list[str]) -> float:
    asked, right = task["number"], 0
    for answer in answers:
        right += answer == str((asked + 1) % 10)
        asked = int(answer) if answer.isdigit() else -1
    return float(right == 2)
