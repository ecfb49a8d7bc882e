"""Weights versions and experts as columns of a trajectory, one for each token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.masking import MaskRule, masked
from agl_otel.adapters.records import Reading, Row, rows_of
from agl_otel.types.columns import CallTexts
from agl_otel.types.experts import decode, encode


def _experts(first: int, last: int, *, mark: int) -> str:
    """Experts of the tokens [first, last) in two layers, which tell token and call."""
    return encode(np.array([[[token, mark]] * 2 for token in range(first, last)]))


def _rows(traces: Any, calls: list[Any], versions: list[str], experts: list[str], **reading: Any) -> list[Row]:
    empty = [""] * len(calls)
    texts = CallTexts(empty, empty, empty, empty, versions, experts, empty)
    return rows_of(Reading(**reading), replace(traces.build(*calls), texts=texts)).rows


def _conversation(row: Any) -> list[Any]:
    """Two calls: a prompt of 3 and a reply of 2 tokens, then one more token of a question and a reply of 2."""
    return [row(call=1, prompt=(1, 2, 3), response=(7, 8)), row(call=2, prompt=(1, 2, 3, 7, 8, 4), response=(9, 10))]


def _told(text: Any) -> list[list[int]]:
    found = decode(text)
    assert found is not None and found.shape[1:] == (2, 2)
    return found[:, 0].tolist()


def test_the_experts_of_a_token_are_of_the_first_call_that_read_it(traces: Any, row: Any) -> None:
    given = [_experts(0, 4, mark=1), _experts(0, 7, mark=2)]
    (found,) = _rows(traces, _conversation(row), ["", ""], given)
    assert len(found["prompt_ids"]) + len(found["response_ids"]) == 8
    assert _told(found["routed_experts"]) == [[0, 1], [1, 1], [2, 1], [3, 1], [4, 2], [5, 2], [6, 2]]


def test_experts_may_begin_after_the_prompt_or_where_an_earlier_call_ended(traces: Any, row: Any) -> None:
    (found,) = _rows(traces, _conversation(row), ["", ""], [_experts(2, 4, mark=1), _experts(4, 7, mark=2)])
    assert _told(found["routed_experts"]) == [[2, 1], [3, 1], [4, 2], [5, 2], [6, 2]]


def test_a_response_that_is_cut_has_the_experts_of_what_is_left(traces: Any, row: Any) -> None:
    for limit, last in ((4, [5, 2]), (2, [3, 1]), (1, [2, 1])):
        given = [_experts(0, 4, mark=1), _experts(0, 7, mark=2)]
        (found,) = _rows(traces, _conversation(row), ["", ""], given, max_response_tokens=limit)
        told = _told(found["routed_experts"])
        assert len(found["response_ids"]) == limit and len(told) == 3 + limit - 1 and told[-1] == last


@pytest.mark.parametrize(
    "experts",
    [
        ["", ""],
        [_experts(0, 4, mark=1), ""],
        [_experts(0, 4, mark=1), _experts(5, 7, mark=2)],
        [_experts(0, 4, mark=1), encode(np.zeros((7, 3, 2), int))],
        ["?", "?"],
        [_experts(0, 9, mark=1), _experts(0, 7, mark=2)],
    ],
    ids=["none", "of one call", "a gap", "of other layers", "no text of ours", "of more tokens"],
)
def test_experts_that_do_not_cover_a_trajectory_are_left_out(traces: Any, row: Any, experts: list[str]) -> None:
    (found,) = _rows(traces, _conversation(row), ["", ""], experts)
    assert "routed_experts" not in found and found["response_ids"] == [7, 8, 4, 9, 10]


@pytest.mark.parametrize(
    ("versions", "by_token"),
    [
        (["", ""], None),
        (["", json.dumps([["1", 0, 1], ["2", 1, 2]])], ["1", "1", "", "1", "2"]),
        ([json.dumps([["0", 0, 1], ["1", 1, 2]]), ""], ["0", "1", "", "1", "1"]),
        (["", "[[1]]"], ["1", "1", "", "1", "1"]),
        (["", json.dumps([["2", -9, 99]])], ["1", "1", "", "2", "2"]),
    ],
)
def test_each_token_has_the_version_that_sampled_it(traces: Any, row: Any, versions: list[str], by_token: Any) -> None:
    (found,) = _rows(traces, _conversation(row), versions, ["", ""])
    assert found.get("token_versions") == by_token
    (labelled,) = _rows(traces, _conversation(row), versions, ["", ""], form="sft")
    assert labelled.get("token_versions") == by_token


def test_a_misaligned_call_is_refused_by_its_reason(traces: Any, row: Any) -> None:
    found = rows_of(Reading(), traces.build(row(incomplete="routing_misaligned")))
    assert not found.rows and found.refused == {"routing_misaligned": 1}


@pytest.mark.parametrize("form", ["trajectories", "sft"])
def test_a_rule_that_drops_ids_drops_experts(traces: Any, row: Any, form: str) -> None:
    (found,) = _rows(traces, [row()], [""], [_experts(0, 4, mark=1)], form=form)
    assert "routed_experts" in found and "routed_experts" not in masked(found, [MaskRule("drop_ids")])
