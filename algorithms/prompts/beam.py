"""Which candidates of a beam search are expanded, and which stay. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def parents_of(beam: Sequence[T], width: int, source: random.Random) -> list[T]:
    """`width` parents: all of a smaller beam in turn, else a sample without repetition."""
    if len(beam) < width:
        return [beam[place % len(beam)] for place in range(width)]
    return source.sample(list(beam), width)


def best_of(candidates: Sequence[T], scores: Sequence[float], width: int) -> list[tuple[T, float]]:
    """The `width` candidates with the best scores, the best first; of equal ones those that came first."""
    ranked = sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1])
    return ranked[:width]


def score_of(rewards: Sequence[float | None]) -> float:
    """The mean reward of rollouts that finished; one without a reward counts 0, and no rollout at all makes 0."""
    return sum(reward or 0.0 for reward in rewards) / max(1, len(rewards))
