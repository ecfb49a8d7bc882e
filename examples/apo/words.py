"""A tiny model that follows a word of its system prompt: just enough to optimise prompts for.

It is log-linear (a weight for each word, digit and answer) and is trained here, in well under a second. The user sends a digit; the
operation that the system prompt names decides which digit it answers. Words that it never saw in training mean nothing to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

OPERATIONS: dict[str, Callable[[int], int]] = {
    "copy": lambda digit: digit,
    "next": lambda digit: (digit + 1) % 10,
    "back": lambda digit: (digit - 1) % 10,
    "flip": lambda digit: 9 - digit,
}
WORDS = tuple(OPERATIONS)
FILLERS = ("please", "just", "now", "answer")
BUCKETS = 256  # words are hashed into so many
STEPS = 30
ROWS = 128


class Model:
    """`Model(seed).answer(system, digit)`."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = np.zeros((BUCKETS, 10, 10))
        source = np.random.default_rng(seed)
        for _ in range(STEPS):
            self._learn(source)

    def scores(self, system: str, digit: int) -> np.ndarray:
        return self.weights[_buckets(system), digit].sum(axis=0)

    def answer(self, system: str, digit: int) -> str:
        return str(int(self.scores(system, digit).argmax()))

    def _learn(self, source: np.random.Generator) -> None:
        """One step of gradient descent on examples: an operation's word among fillers, or fillers alone and any answer."""
        for _ in range(ROWS):
            words = list(source.choice(FILLERS, source.integers(0, 3)))
            word = str(source.choice([*WORDS, ""]))
            digit = int(source.integers(10))
            wanted = OPERATIONS[word](digit) if word else int(source.integers(10))
            system = " ".join([*words, word])
            scores = self.scores(system, digit)
            share = np.exp(scores - scores.max())
            share /= share.sum()
            share[wanted] -= 1.0
            np.subtract.at(self.weights, (_buckets(system), digit), 0.05 * share)


def _buckets(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % BUCKETS for word in text.lower().replace(".", " ").split()] or [0]
