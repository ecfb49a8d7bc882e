from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters.near import WORDS, Shingles, jaccard, leaders, shingles


def brute(sets: list[Shingles], least: float) -> list[int]:
    """Compare each set with each one that is kept."""
    kept: list[int] = []
    found: list[int] = []
    for place, each in enumerate(sets):
        own = set(each.tolist())
        near = [k for k in kept if _similar(set(sets[k].tolist()), own, least)]
        found.append(near[0] if near else place)
        kept += [] if near else [place]
    return found


def _similar(first: set[int], second: set[int], least: float) -> bool:
    both = first | second
    return not both or len(first & second) / len(both) >= least - 1e-12


@given(
    st.lists(st.sets(st.integers(0, 15), max_size=12), max_size=12),
    st.sampled_from([0.01, 0.2, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0]),
)
def test_leaders_are_those_of_comparing_each_with_each(given_sets: list[set[int]], least: float) -> None:
    sets = [np.array(sorted(each), np.uint64) for each in given_sets]
    assert leaders(sets, least) == brute(sets, least)


@pytest.mark.parametrize("least", [0.5, 0.8, 0.9])
def test_leaders_of_many_large_sets_are_those_of_comparing_each_with_each(least: float) -> None:
    source = random.Random(least)
    sets: list[Shingles] = []
    for _ in range(150):
        if sets and source.random() < 0.6:
            earlier = source.choice(sets).tolist()
            changed = source.randrange(0, 1 + len(earlier) // 3)
            values = {*source.sample(earlier, len(earlier) - changed), *(source.getrandbits(64) for _ in range(changed))}
        else:
            values = {source.getrandbits(64) for _ in range(source.randrange(20, 120))}
        sets.append(np.array(sorted(values), np.uint64))
    found = leaders(sets, least)
    assert found == brute(sets, least)
    assert 0 < sum(place != leader for place, leader in enumerate(found)) < len(sets), "the worlds have both"
    kept = [sets[place] for place, leader in enumerate(found) if place == leader]
    assert all(jaccard(a, b) < least for n, a in enumerate(kept) for b in kept[:n])


def test_one_other_word_changes_as_many_shingles_as_a_shingle_has_words() -> None:
    words = [f"w{number}" for number in range(50)]
    other = [*words[:25], "another", *words[26:]]
    first, second = shingles(" ".join(words)), shingles(" ".join(other))
    assert len(first) == len(second) == 50 - WORDS + 1
    assert jaccard(first, second) == (48 - WORDS) / (48 + WORDS)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("Where is it?", "where  is it?\n", 1.0),
        ("yes", "yes", 1.0),
        ("yes", "no", 0.0),
        ("", "", 1.0),
        ("", "yes", 0.0),
        ("a b c", "c b a", 0.0),
        ("\ud800 x", "\ud800 x", 1.0),
    ],
)
def test_texts_are_compared_by_their_words_in_order(first: str, second: str, alike: float) -> None:
    assert jaccard(shingles(first), shingles(second)) == alike


def test_shingles_are_the_same_in_every_process() -> None:
    assert shingles("a b c d").tolist() == shingles("A B C D").tolist() == [7509283141879459177, 10439311701971288362]
