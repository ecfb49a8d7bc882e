"""The tasks: numbers of three digits; the expected answer is one digit, which depends on the last digit.

The model starts out giving each of four answers about equally often. `target` says which of them is rewarded, and training
must find out from the rewards alone. The held-out numbers are in neither the warm start nor the training tasks.
"""

from __future__ import annotations

import random

from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, TRAIN_NUMBERS, question

VAL_TASKS = 128


def train(target: int = 1) -> list[dict[str, str]]:
    """Return the training tasks."""
    return [task(number, target) for number in TRAIN_NUMBERS]


def val(target: int = 1) -> list[dict[str, str]]:
    """Return tasks with held-out numbers, in a fixed order."""
    return [task(number, target) for number in random.Random(0).sample(HELD_OUT_NUMBERS, VAL_TASKS)]


def task(number: int, target: int) -> dict[str, str]:
    """Make a task: the question, and the answer that is rewarded."""
    return {"question": question(number), "expected": str(BEHAVIOURS[target](number % 10))}
