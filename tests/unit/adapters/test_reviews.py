"""Reviews: agreement against Cohen's own example and an enumeration, the order of the queue, and rubrics."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters.reviews import agreement, disagreements, labels_in, shuffled
from agl_otel.errors import UsageError
from agl_otel.types.reviews import Review


def reviews(counts: list[list[int]]) -> tuple[dict[int, str], dict[int, str]]:
    """Return the labels of two reviewers with this confusion matrix."""
    pairs = [(row, column) for row, line in enumerate(counts) for column, count in enumerate(line) for _ in range(count)]
    return {place: f"l{row}" for place, (row, _) in enumerate(pairs)}, {place: f"l{column}" for place, (_, column) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("counts", "kappa"),
    [
        ([[88, 14, 18], [10, 40, 10], [2, 6, 12]], 0.29 / 0.59),  # Cohen 1960, table 1: agreement 0.70, by chance 0.41
        ([[20, 5], [10, 15]], 0.4),
        ([[45, 15], [25, 15]], 0.06 / 0.46),
        ([[25, 35], [5, 35]], 0.14 / 0.54),
        ([[3, 0], [0, 4]], 1.0),
        ([[0, 2], [2, 0]], -1.0),
        ([[1, 1], [1, 1]], 0.0),
        ([[5, 5], [0, 0]], 0.0),
    ],
)
def test_kappa_is_that_of_examples_computed_by_hand(counts: list[list[int]], kappa: float) -> None:
    found = agreement(("ann", "bob"), *reviews(counts))
    assert found.kappa == pytest.approx(kappa, abs=1e-12) and found.undefined == ""
    assert found.n == sum(map(sum, counts)) and found.labels == [f"l{place}" for place in range(len(counts))]
    assert found.counts == counts


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), max_size=12))
def test_kappa_equals_an_enumeration_of_all_pairings(pairs: list[tuple[str, str]]) -> None:
    first, second = ({place: pair[side] for place, pair in enumerate(pairs)} for side in (0, 1))
    found = agreement(("ann", "bob"), first, second)
    if not pairs:
        assert found.kappa is None and found.undefined
        return
    observed = Fraction(sum(a == b for a, b in pairs), len(pairs))
    by_chance = Fraction(sum(a == b for a, b in product(first.values(), second.values())), len(pairs) ** 2)
    assert (found.observed, found.expected) == (pytest.approx(float(observed)), pytest.approx(float(by_chance)))
    if by_chance == 1:
        assert found.kappa is None and "one label" in found.undefined
    else:
        assert found.kappa == pytest.approx(float((observed - by_chance) / (1 - by_chance)), abs=1e-12)


def test_only_what_both_have_reviewed_is_compared() -> None:
    found = agreement(("ann", "bob"), {1: "good", 2: "bad", 3: "good"}, {2: "bad", 3: "bad", 4: "good"})
    assert (found.n, found.labels, found.counts) == (2, ["bad", "good"], [[1, 0], [1, 0]])
    nothing = agreement(("ann", "bob"), {1: "good"}, {2: "good"})
    assert (nothing.n, nothing.kappa, nothing.observed) == (0, None, None) and "no attempt" in nothing.undefined


def review(
    attempt: str, source: str, label: str, *, value: float | None = None, rubric: str = "r@1", name: str = "n", time: int = 0
) -> Review:
    return Review("ro", attempt, source, rubric, name, label, value, time)


def test_judges_disagree_who_differ_under_one_rubric_and_name() -> None:
    found = disagreements(
        [
            review("far", "ann", "good", value=1.0),
            review("far", "judge", "bad", value=0.0),
            review("near", "ann", "", value=1.0),
            review("near", "judge", "", value=0.5),
            review("same", "ann", "good"),
            review("same", "judge", "good"),
            review("other rubric", "ann", "good"),
            review("other rubric", "judge", "bad", rubric="r@2"),
            review("other name", "ann", "good"),
            review("other name", "judge", "bad", name="m"),
            review("alone", "ann", "good"),
        ]
    )
    assert list(found) == [("ro", "far"), ("ro", "near")], "the widest first"
    assert found["ro", "far"] == "r@1: ann good, judge bad" and found["ro", "near"] == "r@1: ann 1, judge 0.5"


def test_a_shuffle_is_the_same_for_all_who_use_its_seed_whatever_was_reviewed() -> None:
    keys = [("ro", f"at-{place:02}") for place in range(50)]
    order = shuffled(keys, "1")
    assert order != keys and sorted(order) == keys and shuffled(keys[::-1], "1") == order != shuffled(keys, "2")
    assert shuffled(keys[10:], "1") == [key for key in order if key in keys[10:]]


def test_the_labels_of_a_rubric_are_its_lines_with_an_equals_sign() -> None:
    assert labels_in("Is it right?\n\ngood = 1\nnot sure =\n  bad=-0.5\n") == [("good", 1.0), ("not sure", None), ("bad", -0.5)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Is it right?", "no label"),
        ("good = yes", "line 1"),
        ("good = inf", "line 1"),
        ("good = 1\ngood = 2", "twice"),
        (" = 1", "line 1"),
        ("\n".join(f"l{place} =" for place in range(10)), "at most 9"),
    ],
)
def test_a_wrong_rubric_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        labels_in(text)
