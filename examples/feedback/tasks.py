"""The tasks: three-digit numbers, each with an answer that depends on the last digit."""

from __future__ import annotations

import random

from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, TRAIN_NUMBERS, question


def train(target: int = 1) -> list[dict[str, str]]:
    """Return the training tasks."""
    return [task(number, target) for number in random.Random(1).sample(TRAIN_NUMBERS, len(TRAIN_NUMBERS))]


def val(target: int = 1) -> list[dict[str, str]]:
    """Return tasks with held-out numbers, in a fixed order."""
    return [task(number, target) for number in random.Random(0).sample(HELD_OUT_NUMBERS, 64)]


def task(number: int, target: int) -> dict[str, str]:
    """Make a task: the question, and the answer that users take for right."""
    return {"question": question(number), "expected": str(BEHAVIOURS[target](number % 10))}
