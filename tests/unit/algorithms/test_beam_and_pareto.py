"""Beam selection and Pareto fronts: worked examples and properties."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.algorithms.prompts.beam import best_of, parents_of
from agl_otel.algorithms.prompts.pareto import ancestors, best, choose, common_ancestor, front, merged, pairs_to_merge

TABLES = st.integers(1, 5).flatmap(
    lambda tasks: st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=tasks, max_size=tasks), min_size=1
    )
)

# --- beam


def test_a_small_beam_is_repeated_and_a_large_one_is_sampled() -> None:
    assert parents_of(["a"], 4, random.Random(0)) == ["a"] * 4
    assert parents_of(["a", "b", "c"], 5, random.Random(0)) == ["a", "b", "c", "a", "b"]
    for seed in range(20):
        assert sorted(parents_of("abcd", 4, random.Random(seed))) == ["a", "b", "c", "d"]
        assert len(set(parents_of("abcdef", 3, random.Random(seed)))) == 3


def test_the_beam_keeps_the_best_and_among_equals_the_first() -> None:
    assert best_of("abcde", [0.5, 0.9, 0.5, 0.9, 0.1], 3) == [("b", 0.9), ("d", 0.9), ("a", 0.5)]
    assert best_of("ab", [0.0, 0.0], 5) == [("a", 0.0), ("b", 0.0)]


# --- the front


def test_the_front_of_a_worked_example() -> None:
    #        task 0  1    2    3
    table = {
        "a": [1.0, 0.0, 0.2, 0.0],  # alone best at 0
        "b": [0.5, 0.8, 0.2, 0.0],  # alone best at 1, as good as a at 2
        "c": [0.5, 0.1, 0.2, 0.0],  # best at nothing alone: dominated
        "d": [0.0, 0.0, 0.0, 0.0],  # at 3 all are equal
    }
    assert front(table) == {"a": {0, 2, 3}, "b": {1, 2, 3}}
    assert best(table) == "b"
    assert front({"a": [0.0, 0.0], "b": [0.0, 0.0]}) == {"a": {0, 1}}, "of equals the first"
    assert front({"a": [1.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0]}) == {"c": {0, 1}}


def test_front_members_are_chosen_in_proportion_to_their_best_tasks() -> None:
    table = {"a": [1.0, 1.0, 1.0, 0.0], "b": [0.0, 0.0, 0.0, 1.0], "c": [0.5, 0.5, 0.5, 0.5]}
    drawn = [choose(table, random.Random(seed)) for seed in range(2000)]
    assert set(drawn) == {"a", "b"} and 1400 < drawn.count("a") < 1600


@given(TABLES)
def test_the_front_covers_all_tasks_and_is_minimal(table: dict[str, list[float]]) -> None:
    members = front(table)
    tasks = range(len(next(iter(table.values()))))
    assert set().union(*members.values()) == set(tasks)
    for version, won in members.items():
        assert won == {task for task in tasks if table[version][task] == max(row[task] for row in table.values())}
        assert won - set[int]().union(*(others for other, others in members.items() if other != version))


@given(TABLES, st.integers())
def test_only_front_members_are_chosen(table: dict[str, list[float]], seed: int) -> None:
    assert choose(table, random.Random(seed)) in front(table)


# --- merging

PARENTS = {"v0": (), "v1": ("v0",), "v2": ("v0",), "v3": ("v1",), "v4": ("v3", "v2")}


def test_ancestors_include_those_of_all_parents() -> None:
    assert ancestors("v4", PARENTS) == {"v0", "v1", "v2", "v3"} and ancestors("v0", PARENTS) == set()


def test_pairs_to_merge_are_of_the_front_and_neither_descends_from_the_other() -> None:
    table = {"v0": [0.0, 0.0, 0.5], "v1": [1.0, 0.0, 0.0], "v2": [0.0, 1.0, 0.0], "v3": [0.9, 0.0, 1.0]}
    assert list(front(table)) == ["v1", "v2", "v3"]
    assert pairs_to_merge(table, PARENTS) == [("v1", "v2"), ("v2", "v3")], "v3 descends from v1"
    assert common_ancestor("v2", "v3", PARENTS, table) == "v0"
    assert common_ancestor("v2", "v3", PARENTS, {**table, "v0": [1.0, 1.0, 1.0]}) is None, "better than both"


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ({"p": "A", "q": "x"}, {"p": "a", "q": "Y"}, {"p": "A", "q": "Y"}),  # each changed one
        ({"p": "A", "q": "x"}, {"p": "B", "q": "x"}, {"p": "A", "q": "x"}),  # both changed one: the better one's
        ({"p": "a", "q": "x"}, {"p": "a", "q": "x"}, {"p": "a", "q": "x"}),
    ],
)
def test_a_merge_takes_the_changed_prompts(left: dict[str, str], right: dict[str, str], wanted: dict[str, str]) -> None:
    ancestor = {"p": "a", "q": "x"}
    assert merged(ancestor, left, right, left_is_better=True) == wanted
    assert merged(ancestor, right, left, left_is_better=False) == wanted


@given(*[st.fixed_dictionaries({name: st.sampled_from("abc") for name in "pqr"}) for _ in range(3)], st.booleans())
def test_a_merge_adds_no_text_and_loses_no_change(
    ancestor: dict[str, str], left: dict[str, str], right: dict[str, str], better: bool
) -> None:
    result = merged(ancestor, left, right, left_is_better=better)
    for name, text in result.items():
        assert text in (left[name], right[name])
        assert text != ancestor[name] or left[name] == right[name] == ancestor[name]
