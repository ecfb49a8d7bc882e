"""Generated word problems of two or three steps. Equal seeds give equal problems; none of `val` is in `train`."""

from __future__ import annotations

import random

TRAIN_TASKS = 1024
VAL_TASKS = 64
STORIES = (
    ("Tom has {a} boxes with {b} pens each and buys {c} more pens. How many pens does he have?", lambda a, b, c: a * b + c),
    ("A baker makes {a} trays of {b} rolls and sells {c} rolls. How many rolls are left?", lambda a, b, c: a * b - c),
    ("{a} buses carry {b} people each, and {c} more people walk. How many people are there?", lambda a, b, c: a * b + c),
    ("A library buys {a} books a month for {b} months and {c} on a fair. How many is that?", lambda a, b, c: a * b + c),
    ("Each of {a} gardens has {b} rows of {c} trees. How many trees are there?", lambda a, b, c: a * b * c),
    ("Ann saves {a} dollars a week for {b} weeks and then spends {c}. How many dollars has she left?", lambda a, b, c: a * b - c),
)


def train(seed: int = 0, count: int = TRAIN_TASKS, scored: int = VAL_TASKS, largest: int = 99) -> list[dict[str, str]]:
    return _tasks(seed, count + scored, largest)[:count]


def val(seed: int = 0, count: int = TRAIN_TASKS, scored: int = VAL_TASKS, largest: int = 99) -> list[dict[str, str]]:
    return _tasks(seed, count + scored, largest)[count:]


def _tasks(seed: int, count: int, largest: int) -> list[dict[str, str]]:
    source, found = random.Random(seed), {}
    while len(found) < count:
        story, answer = source.choice(STORIES)
        a, b, c = (source.randint(2, largest) for _ in range(3))
        found.setdefault(story.format(a=a, b=b, c=c), str(answer(a, b, c)))
    return [{"question": question, "expected": expected} for question, expected in found.items()]
