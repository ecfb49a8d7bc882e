"""Near-duplicates among texts: exact Jaccard similarity of their shingles, without comparing each with each. Pure.

Two sets with a similarity of t share one of the rarest elements of both: of n elements, sorted by how many sets have them, among the first
n - ceil(t n) + 1 (prefix filtering: R. Bayardo, Y. Ma, R. Srikant, Scaling Up All Pairs Similarity Search, WWW 2007). So an index of these
few finds all candidates, and each is compared whole: unlike MinHash's, the result is exact, and the same every time.
"""

from __future__ import annotations

import functools
import math
import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORDS: Final = 3
"""Words of a shingle: another word changes three of them."""
_WORD: Final = re.compile(r"\w+|[^\w\s]")
_NONE: Final = -1
"""Stands in the index for the elements of an empty set: all empty sets are alike."""
_SLACK: Final = 1e-9  # of products of floats that are whole numbers
_MIXER: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, and its bits look random: the golden ratio
Shingles = NDArray[np.uint64]


def shingles(text: str) -> Shingles:
    """Return the hashes of each WORDS successive words of a text, or of all it has, regardless of case; each once, sorted."""
    words = np.array([_hash(word) for word in _WORD.findall(text.casefold())], np.uint64)
    size = min(WORDS, len(words))
    found = np.zeros(len(words) - size + 1 if size else 0, np.uint64)
    for place in range(size):
        found = (found ^ words[place : place + len(found)]) * _MIXER  # modulo 2 ** 64
        found ^= found >> np.uint64(29)
    return np.unique(found)


@functools.lru_cache(1 << 18)
def _hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(errors="replace"), digest_size=8).digest())


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
    sizes = np.array([len(each) for each in sets], np.int64)
    index: dict[int, array[int]] = {}
    is_own = np.zeros(max((int(each[-1]) + 1 for each in ranked if len(each)), default=0), np.bool_)
    found: list[int] = []
    for place, ranks in enumerate(ranked):
        size = len(ranks)
        rarest = ranks[: size - math.ceil(least * size - _SLACK) + 1].tolist() if size else [_NONE]
        is_own[ranks] = True
        leader = place
        for each in _places([index[rank] for rank in rarest if rank in index], len(sets)):
            if min(size, sizes[each]) < least * max(size, sizes[each]) - _SLACK:
                continue
            common = int(is_own[ranked[each]].sum())
            if common >= least * (size + sizes[each] - common) - _SLACK:
                leader = each
                break
        is_own[ranks] = False
        found.append(leader)
        if leader == place:
            for rank in rarest:
                index.setdefault(rank, array("q")).append(place)
    return found


def _places(lists: Sequence[array[int]], count: int) -> list[int]:
    """Return the numbers in some lists, all below `count`, each once and sorted."""
    is_in = np.zeros(count, np.bool_)
    for each in lists:
        is_in[np.frombuffer(each, np.int64)] = True
    return np.flatnonzero(is_in).tolist()


def _by_rarity(sets: Sequence[Shingles]) -> list[NDArray[np.int64]]:
    """Replace each element by its rank, the rarest first; each set sorted."""
    if not sets:
        return []
    _, inverse, counts = np.unique(np.concatenate(sets), return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    ends = np.cumsum([len(each) for each in sets])
    return [np.sort(part) for part in np.split(rank[inverse], ends[:-1])]
