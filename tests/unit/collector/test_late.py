"""Which ids late spans get, and their numbers; without a store."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.collector.adopt import input_of
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.late import Pending, identified, number_requests, numbered
from agl_otel.collector.policy import DROPPED, apply_policy
from tests.compared import COMPARED, Text

ONE = ("ro-1", "at-1")
TWO = ("ro-2", "at-2")


def pending(span: str, above: str = "", /, *, received: int = 0, sequences: tuple[str, str] = ("", ""), **more: Any) -> Pending:
    return Pending("t", span, above, received, 0, 0, sequences, more.pop("invalid", False), **more)


def ids_of_copies(*spans: Pending) -> dict[str, str]:
    return {copy.span.span_id: copy.rollout_id for copy in identified(spans)}


def test_the_trace_wins_over_the_parent() -> None:
    assert ids_of_copies(pending("a", "p", opener=ONE, parent=TWO)) == {"a": "ro-1"}


def test_a_chain_is_followed_whatever_the_order() -> None:
    assert ids_of_copies(pending("c", "b"), pending("a", "p", parent=TWO), pending("b", "a")) == {"a": "ro-2", "b": "ro-2", "c": "ro-2"}


def test_spans_without_identification_are_left_out() -> None:
    assert ids_of_copies(pending("a"), pending("b", "a"), pending("c", "d"), pending("d", "c"), pending("e", "e")) == {}


@pytest.mark.parametrize("end", ["span 0", "unknown"], ids=["circle", "chain"])
def test_a_chain_of_parents_is_walked_in_linear_time(end: str) -> None:
    ids = [Text(f"span {number}") for number in range(3000)]
    spans = [pending(own, above) for own, above in zip(ids, [*ids[1:], Text(end)], strict=True)]
    COMPARED.clear()
    assert identified(spans) == []
    assert COMPARED.total() < 20 * len(ids)


def test_a_refused_span_is_not_copied_and_gives_its_children_no_ids() -> None:
    assert ids_of_copies(pending("a", "p", parent=ONE, invalid=True), pending("b", "a"), pending("c", "a", opener=TWO)) == {"c": "ro-2"}


def test_copies_come_in_the_order_of_arrival() -> None:
    spans = [pending(name, opener=ONE, received=time) for name, time in (("a", 3), ("b", 1), ("c", 2))]
    assert [copy.span.span_id for copy in identified(spans)] == ["b", "c", "a"]


def test_explicit_numbers_are_kept_and_raise_the_counter() -> None:
    spans = [pending("a", opener=ONE), pending("b", opener=ONE, sequences=("9", "")), pending("c", opener=TWO, sequences=("", "0"))]
    copies = identified(spans)
    assert number_requests(copies) == [("ro-1", 1, 9), ("ro-2", 0, 0)]
    assert numbered(copies, {"ro-1": 10, "ro-2": 0}) == [10, 9, 0]


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1.0", "x", "٣", "9007199254740992", "00000000000000001"])
def test_texts_that_are_not_numbers_are_ignored(text: str) -> None:
    assert pending("a", sequences=(text, "")).sequence is None
    assert pending("a", sequences=(text, "4")).sequence == 4


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_every_span_gets_the_ids_of_its_nearest_known_ancestor(parents: dict[int, int], known: set[int]) -> None:
    """`parents` of pending spans; the parents of those in `known` are stored with ids."""
    spans = [pending(f"{n}", f"{parent}", parent=(f"ro-{n}", "") if n in known else ("", "")) for n, parent in parents.items()]
    expected: dict[str, str] = {}
    for start in parents:
        step, seen = start, set[int]()
        while step in parents and step not in known and step not in seen:
            seen.add(step)
            step = parents[step]
        if step in parents and step in known:
            expected[f"{start}"] = f"ro-{step}"
    assert ids_of_copies(*spans) == expected


def test_only_the_drop_policy_drops_and_only_unidentified_spans() -> None:
    identities = [Identity(), Identity("ro-1"), Identity(reason="broken"), Identity(sequence=4)]
    assert list(apply_policy(Identities.of(identities), "keep")) == list(apply_policy(Identities.of(identities), "adopt")) == identities
    assert [identity.reason for identity in apply_policy(Identities.of(identities), "drop")] == [DROPPED, "", "broken", DROPPED]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        ({"other": "x"}, None),
        ({"gen_ai.input.messages": "[]"}, []),
        ({"input.value": "plain"}, "plain"),
        ({"input.value": '{"q": 1}', "gen_ai.input.messages": ""}, {"q": 1}),
        ({"input.value": "{broken"}, "{broken"),
        ({"input.value": "7", "gen_ai.input.messages": '[{"role": "user"}]'}, [{"role": "user"}]),
    ],
)
def test_the_input_of_an_adopted_trace_is_read_from_its_root_span(attributes: dict[str, str], expected: object) -> None:
    assert input_of(attributes) == expected
