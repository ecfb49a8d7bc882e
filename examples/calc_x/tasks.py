"""Generated word problems of two steps each, solved by one or two calls of the calculator."""

from __future__ import annotations

import random

TRAIN_TASKS = 512
VAL_TASKS = 64
STORIES = (
    ("Tom has {a} boxes with {b} pens each and buys {c} more pens. How many pens does he have?", lambda a, b, c: a * b + c),
    ("A shop had {c} apples more than {a} times {b}, and has sold {a}. How many are left?", lambda a, b, c: a * b + c - a),
    ("{a} friends share {b} trays of {c} cakes with nobody else. How many cakes are there?", lambda a, b, c: b * c),
)


def train(seed: int = 0) -> list[dict[str, str]]:
    return _tasks(random.Random(seed), TRAIN_TASKS)


def val(seed: int = 1) -> list[dict[str, str]]:
    return _tasks(random.Random(seed), VAL_TASKS)


def _tasks(source: random.Random, count: int) -> list[dict[str, str]]:
    tasks = []
    for _ in range(count):
        story, answer = source.choice(STORIES)
        a, b, c = (source.randint(2, 99) for _ in range(3))
        tasks.append({"question": story.format(a=a, b=b, c=c), "expected": str(answer(a, b, c))})
    return tasks
