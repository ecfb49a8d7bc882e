"""Select the candidates of a beam search to expand and to keep. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def parents_of(beam: Sequence[T], width: int, source: random.Random) -> list[T]:
    """Choose `width` parents: a smaller beam is repeated in turn, a larger one is sampled without replacement."""
    if len(beam) < width:
        return [beam[place % len(beam)] for place in range(width)]
    return source.sample(list(beam), width)


def best_of(candidates: Sequence[T], scores: Sequence[float], width: int) -> list[tuple[T, float]]:
    """Return the `width` candidates with the best scores, best first; among equal scores the earlier ones."""
    ranked = sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1])
    return ranked[:width]
