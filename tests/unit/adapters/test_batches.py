from __future__ import annotations

import hashlib
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters.batches import beyond, by_value, digest_of, gone, lines_of, rows_in, task_of, task_text, variances
from agl_otel.errors import DataError
from agl_otel.types import Attempt, AttemptedRollout, Rollout
from agl_otel.types.selections import Selected

ROWS = [Selected(rollout_id="ro-1", attempt_id="at-1", reward=0.1, cluster="é \u2028 x"), Selected(rollout_id="ro-2", attempt_id="at-2")]


def test_the_table_is_json_lines_whose_digest_is_its_sha256() -> None:
    lines = lines_of(ROWS)
    assert lines.startswith('{"attempt_id":"at-1","cluster":"é \u2028 x","reward":0.1,"rollout_id":"ro-1","value":null}\n')
    assert digest_of(lines) == hashlib.sha256(lines.encode()).hexdigest()
    assert rows_in(lines, digest_of(lines), "here") == ROWS


@given(st.integers(0, len(lines_of(ROWS)) - 1), st.characters(codec="utf-8"))
def test_one_other_character_is_damage(place: int, other: str) -> None:
    lines = lines_of(ROWS)
    changed = lines[:place] + other + lines[place + 1 :]
    if changed != lines:
        with pytest.raises(DataError, match="hard@2 is damaged or was edited"):
            rows_in(changed, digest_of(lines), "hard@2")


@pytest.mark.parametrize("lines", ["x\n", "{}\n", '{"rollout_id":"ro-1","attempt_id":"at-1","reward":"Infinity"}\n'])
def test_what_is_no_table_is_refused_by_its_name(lines: str) -> None:
    with pytest.raises(DataError, match="hard@2 is no selection"):
        rows_in(lines, digest_of(lines), "hard@2")


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_value_of_tasks_with_rewards_0_and_1_is_p_times_1_minus_p(size: int) -> None:
    for rewards in product((0.0, 1.0), repeat=size):
        p = sum(rewards) / size
        found = variances(dict(enumerate(rewards)), dict.fromkeys(range(size), "task"))
        assert all(value == pytest.approx(p * (1 - p), abs=1e-15) for value in found.values())


def test_the_value_is_unknown_without_two_rewards_at_a_task() -> None:
    rewards = {"a": 1.0, "b": None, "c": 1.0, "d": 3.0, "e": None}
    tasks = {"a": "one", "b": "one", "c": "two", "d": "two", "e": "two"}
    assert variances(rewards, tasks) == {"a": None, "b": None, "c": 1.0, "d": 1.0, "e": None}


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.sampled_from([0.0, 0.25, 1.0])), max_size=12))
def test_the_most_valuable_come_first_and_tasks_stay_together(given_keys: list[tuple[int, float | None]]) -> None:
    worth: dict[int, float | None] = {}
    for task, value in given_keys:
        worth.setdefault(task, value)
    keys = list(range(len(given_keys)))
    tasks = {key: str(given_keys[key][0]) for key in keys}
    values = {key: worth[given_keys[key][0]] for key in keys}
    ordered = by_value(keys, values, tasks)
    assert sorted(ordered) == keys
    assert ordered == sorted(ordered, key=lambda key: (values[key] is None, -(values[key] or 0.0))), "falling, unknown ones last"
    runs = [task for n, task in enumerate(map(tasks.__getitem__, ordered)) if not n or task != tasks[ordered[n - 1]]]
    assert len(runs) == len(set(runs)), "the attempts at a task are neighbours"


def test_what_is_beyond_the_first_of_each_group_is_named_in_order() -> None:
    assert beyond("abcdef", dict(zip("abcdef", "xyxxyx", strict=True)), 2) == ["d", "f"]


def rollout(task: Any, name: str = "ro-1") -> Rollout:
    return Rollout(rollout_id=name, input=task, start_time=1.0)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ({"question": "why?", "n": 3}, "why?\n3"),
        ([{"role": "system", "content": "rules"}, {"role": "user", "content": "why?"}], "why?"),
        ({"messages": [{"role": "user", "parts": [{"type": "text", "content": "why?"}]}]}, "why?"),
        ("plain", "plain"),
        (None, "ro-1"),
    ],
)
def test_the_text_of_a_task_is_what_its_input_says_without_the_system(task: Any, text: str) -> None:
    assert task_text(rollout(task)) == text


def test_rollouts_without_an_input_are_tasks_of_their_own() -> None:
    assert task_of(rollout(None, "ro-1")) != task_of(rollout(None, "ro-2"))
    assert task_of(rollout({"a": 1, "b": 2}, "ro-1")) == task_of(rollout({"b": 2, "a": 1}, "ro-2"))


def test_attempts_that_are_deleted_or_replaced_are_gone() -> None:
    def with_attempt(name: str, attempt_id: str) -> AttemptedRollout:
        attempt = Attempt(rollout_id=name, attempt_id=attempt_id, sequence_id=1, start_time=1.0)
        return AttemptedRollout(rollout_id=name, input={}, start_time=1.0, attempt=attempt)

    rows = [Selected(rollout_id=f"ro-{n}", attempt_id=f"at-{n}") for n in range(4)]
    now = {"ro-0": with_attempt("ro-0", "at-0"), "ro-1": with_attempt("ro-1", "at-9"), "ro-2": rollout({}, "ro-2")}
    assert gone(rows, now) == [("ro-1", "at-1", "replaced"), ("ro-2", "at-2", "replaced"), ("ro-3", "at-3", "deleted")]
