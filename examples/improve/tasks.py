"""The held-out tasks: questions with numbers that no user asks."""

from __future__ import annotations

import random

from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, question


def val(taste: int = 1) -> list[dict[str, str]]:
    """Return tasks in a fixed order."""
    return [task(number, taste) for number in random.Random(0).sample(HELD_OUT_NUMBERS, 64)]


def task(number: int, taste: int) -> dict[str, str]:
    """Make a task: the question, and the answer that users of this taste want."""
    return {"question": question(number), "expected": str(BEHAVIOURS[taste](number % 10))}
