"""Near-duplicates among texts: exact Jaccard similarity of their shingles, without comparing each with each. Pure.

Two sets with a similarity of t share one of the rarest elements of both: of n elements, sorted by how many sets have them, among the first
n - ceil(t n) + 1 (prefix filtering: R. Bayardo, Y. Ma, R. Srikant, Scaling Up All Pairs Similarity Search, WWW 2007). So an index of these
few finds all candidates, and each is compared whole: unlike MinHash's, the result is exact, and the same every time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORDS: Final = 3
"""Words of a shingle: another word changes three of them."""
_WORD: Final = re.compile(r"\w+|[^\w\s]")
_SLACK: Final = 1e-9  # of products of floats that are whole numbers
Shingles = NDArray[np.uint64]


def shingles(text: str) -> Shingles:
    """Return the hashes of each WORDS successive words of a text, or of all it has, regardless of case; each once, sorted."""
    words = _WORD.findall(text.casefold())
    runs = {"\0".join(words[start : start + WORDS]) for start in range(max(1, len(words) - WORDS + 1))} if words else set[str]()
    found = [int.from_bytes(blake2b(run.encode(errors="replace"), digest_size=8).digest()) for run in runs]
    return np.sort(np.array(found, np.uint64))


def jaccard(first: Shingles, second: Shingles) -> float:
    """Return the share of common elements in all of both; 1 for two empty sets."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    total = len(first) + len(second) - common
    return common / total if total else 1.0


def leaders(sets: Sequence[Shingles], least: float) -> list[int]:
    """Return for each set the place of the first one before it that is kept and as similar as `least` (above 0), else its own: it is kept.

    So no two kept ones are near-duplicates, and each other one is of one that is kept.
    """
    ranked = _by_rarity(sets)
    index: dict[int, list[int]] = {}
    found: list[int] = []
    for place, ranks in enumerate(ranked):
        size = len(ranks)
        rarest = ranks[: size - math.ceil(least * size - _SLACK) + 1].tolist() if size else [-1]  # -1: all empty sets are alike
        candidates = sorted({each for rank in rarest for each in index.get(rank, ())})
        leader = next((each for each in candidates if _are_near(ranked[each], ranks, least)), place)
        found.append(leader)
        if leader == place:
            for rank in rarest:
                index.setdefault(rank, []).append(place)
    return found


def _by_rarity(sets: Sequence[Shingles]) -> list[NDArray[np.int64]]:
    """Replace each element by its rank, the rarest first; each set sorted."""
    if not sets:
        return []
    _, inverse, counts = np.unique(np.concatenate(sets), return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    ends = np.cumsum([len(each) for each in sets])
    return [np.sort(part) for part in np.split(rank[inverse], ends[:-1])]


def _are_near(first: NDArray[np.int64], second: NDArray[np.int64], least: float) -> bool:
    small, large = sorted((len(first), len(second)))
    if small < least * large - _SLACK:
        return False
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common >= least * (small + large - common) - _SLACK
