"""Which of many token sequences does another one begin with? Found by sums over their tokens, for all of them at once. Pure.

The sum of tokens t₀ … tₙ₋₁ is Σ (tᵢ + 1) · Bⁱ modulo 2⁶⁴ (Rabin and Karp's, 1987), so one pass over a sequence gives the sums of all its
beginnings. Equal sums are candidates: whoever asks compares the tokens, because sequences may be made to collide.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.uint64]
_BASE: Final = 0x9E3779B97F4A7C15


class _Powers:
    """B⁰, B¹, …, as many as were asked for."""

    def __init__(self) -> None:
        self._known = np.ones(1, np.uint64)

    def first(self, count: int) -> Sums:
        if count > len(self._known):
            factors = np.full(max(count, 2 * len(self._known)), _BASE, np.uint64)
            factors[0] = 1
            self._known = np.cumprod(factors)
        return self._known[:count]


_powers: Final = _Powers()


def sums_of(tokens: NDArray[np.int32], more: NDArray[np.int32] | None = None) -> Sums:
    """uint64 [tokens + more + 1]: the sum of each beginning of the tokens, the empty one's first."""
    whole = tokens if more is None else np.concatenate([tokens, more])
    sums = np.zeros(len(whole) + 1, np.uint64)
    np.cumsum((whole.astype(np.uint64) + np.uint64(1)) * _powers.first(len(whole)), out=sums[1:])
    return sums


class Beginnings:
    """Sequences, each known by its length and its sum.

    Args:
        capacity: how many there will be at most.
    """

    def __init__(self, capacity: int) -> None:
        self._lengths = np.zeros(capacity, np.int64)
        self._sums = np.zeros(capacity, np.uint64)
        self._count = 0

    def set(self, place: int, sums: Sums) -> None:
        """Keep the whole sequence whose `sums` these are at `place`, which is a known one, or the next."""
        self._lengths[place], self._sums[place] = len(sums) - 1, sums[-1]
        self._count = max(self._count, place + 1)

    def of(self, sums: Sums) -> list[int]:
        """The places of those that the sequence with these `sums` probably begins with, in order."""
        lengths: Any = self._lengths[: self._count]
        shorter = np.flatnonzero(lengths < len(sums))
        return shorter[sums[lengths[shorter]] == self._sums[shorter]].tolist()
