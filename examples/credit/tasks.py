"""The tasks: five questions of three-digit numbers, each with an answer that depends on the last digit (first_light has one of them)."""

from __future__ import annotations

import random

from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, TRAIN_NUMBERS, question

STEPS = 5


def train(target: int = 1) -> list[dict[str, list[str]]]:
    """Return the training tasks."""
    numbers = random.Random(1).sample(TRAIN_NUMBERS, len(TRAIN_NUMBERS))
    return [task(numbers[start : start + STEPS], target) for start in range(0, len(numbers) - STEPS + 1, STEPS)]


def val(target: int = 1) -> list[dict[str, list[str]]]:
    """Return tasks with held-out numbers, in a fixed order."""
    source = random.Random(0)
    return [task(source.sample(HELD_OUT_NUMBERS, STEPS), target) for _ in range(32)]


def task(numbers: list[int], target: int) -> dict[str, list[str]]:
    """Make a task: the questions, and the answers that are rewarded."""
    return {"questions": [question(number) for number in numbers], "expected": [str(BEHAVIOURS[target](number % 10)) for number in numbers]}
