"""An index of token sequences by hash, to find those that are a prefix of another one. Pure.

The rolling hash of tokens t₀ … tₙ₋₁ is Σ (tᵢ + 1) · Bⁱ modulo 2⁶⁴ (Rabin and Karp, 1987), so one pass over a sequence yields the hashes of
all its prefixes. Equal hashes only give candidates: the caller compares the tokens, since collisions can be provoked.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
_BASE: Final = 0x9E3779B97F4A7C15


class _Powers:
    """The powers B⁰, B¹, …, computed on demand."""

    def __init__(self) -> None:
        self._known = np.ones(1, np.uint64)

    def first(self, count: int) -> Hashes:
        if count > len(self._known):
            factors = np.full(max(count, 2 * len(self._known)), _BASE, np.uint64)
            factors[0] = 1
            self._known = np.cumprod(factors)
        return self._known[:count]


_powers: Final = _Powers()


def rolling_hashes(tokens: NDArray[np.int32], more: NDArray[np.int32] | None = None) -> Hashes:
    """Return uint64 [tokens + more + 1]: the hash of each prefix of the tokens, starting with the empty one."""
    whole = tokens if more is None else np.concatenate([tokens, more])
    hashes = np.zeros(len(whole) + 1, np.uint64)
    np.cumsum((whole.astype(np.uint64) + np.uint64(1)) * _powers.first(len(whole)), out=hashes[1:])
    return hashes


class PrefixIndex:
    """Sequences, each stored as its length and hash.

    Args:
        capacity: the greatest number of sequences.
    """

    def __init__(self, capacity: int) -> None:
        self._lengths = np.zeros(capacity, np.int64)
        self._hashes = np.zeros(capacity, np.uint64)
        self._count = 0

    def set(self, place: int, hashes: Hashes) -> None:
        """Store the sequence with these `hashes` at `place`, an existing place or the next one."""
        self._lengths[place], self._hashes[place] = len(hashes) - 1, hashes[-1]
        self._count = max(self._count, place + 1)

    def of(self, hashes: Hashes) -> list[int]:
        """Return the sorted places of sequences that are probably a prefix of the one with these `hashes`."""
        lengths: Any = self._lengths[: self._count]
        shorter = np.flatnonzero(lengths < len(hashes))
        return shorter[hashes[lengths[shorter]] == self._hashes[shorter]].tolist()
