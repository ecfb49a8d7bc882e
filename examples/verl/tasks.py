"""The tasks: the number of three digits in the first question, and the first two digits of the number in the second."""

import random

from agl_otel.algorithms.grpo.tiny import HELD_OUT_NUMBERS, TRAIN_NUMBERS

VAL_TASKS = 64


def train(size: int = 640) -> list[dict[str, int]]:
    numbers = random.Random(1)
    return [{"number": numbers.choice(TRAIN_NUMBERS), "tens": numbers.randrange(10, 100)} for _ in range(size)]


def val(size: int = 640) -> list[dict[str, int]]:
    numbers = random.Random(2)
    return [{"number": numbers.choice(HELD_OUT_NUMBERS), "tens": numbers.randrange(10, 100)} for _ in range(VAL_TASKS)]
