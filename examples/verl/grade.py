"""Reward 1.0 if both answers are correct: one more than the last digit that was asked about."""

from typing import Any


def grade(task: dict[str, Any], answers: list[str]) -> float:
    asked, right = task["number"], 0
    for answer in answers:
        right += answer == str((asked + 1) % 10)
        asked = int(answer) if answer.isdigit() else -1
    return float(right == 2)
