from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.spans import attributes as agl
from agl_otel.types import Span
from agl_otel_hook import attributes, conventions

LEAVES = st.one_of(st.text(), st.booleans(), st.integers(), st.floats(allow_nan=False))
KEYS = st.text("abc", min_size=1)
NESTED = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda inner: st.lists(inner, min_size=1) | st.dictionaries(KEYS, inner, min_size=1), max_leaves=8)
)


@given(NESTED)
def test_unflatten_inverts_flatten(nested: dict[str, Any]) -> None:
    assert agl.unflatten_attributes(attributes.flatten_attributes(nested, expand_leaf_lists=True)) == nested


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({"a": {"b": 1, "c": [2, 3]}}, {"a.b": 1, "a.c": [2, 3]}),
        ({"a": [1, "x"]}, {"a.0": 1, "a.1": "x"}),  # mixed
        ({"a": [True, 1]}, {"a.0": True, "a.1": 1}),
        ({"a": [[1, 2], {"b": None}]}, {"a.0": [1, 2], "a.1.b": None}),
        ({"a": [], "b": {}, "c": ("x",)}, {"c": ["x"]}),
        (["a", {"b": 1}], {"0": "a", "1.b": 1}),
    ],
)
def test_nested_data_is_flattened_to_dotted_keys(nested: Any, flat: dict[str, Any]) -> None:
    assert attributes.flatten_attributes(nested) == flat


def test_a_key_that_is_not_a_str_is_rejected() -> None:
    with pytest.raises(ValueError, match="1 "):
        attributes.flatten_attributes({"a": {1: 2}})
    with pytest.raises(ValueError, match="strings"):
        attributes.check_attributes_sanity({1: 2})


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        ({"0": "a", "1": "b"}, ["a", "b"]),
        ({"a.1": "x", "a.2": "y"}, {"a": {"1": "x", "2": "y"}}),  # not from 0
        ({"a.0": "x", "a.b": "y"}, {"a": {"0": "x", "b": "y"}}),
        ({}, {}),
    ],
)
def test_only_consecutive_indices_from_zero_become_a_list(flat: dict[str, Any], nested: Any) -> None:
    assert agl.unflatten_attributes(flat) == nested


def test_a_prefix_matches_whole_parts_of_a_key() -> None:
    attributes = {"a": 0, "a.b": 1, "ab.c": 2}
    assert agl.filter_attributes(attributes, "a") == {"a": 0, "a.b": 1}
    with pytest.raises(ValueError, match="'a'"):
        agl.filter_and_unflatten_attributes(attributes, "a")
    assert agl.filter_and_unflatten_attributes(attributes, "ab") == {"c": 2}


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        ("a", "a"),
        (["a", "b"], ["a", "b"]),
        ([True, False], [True, False]),
        ([1, True], [1, 1]),
        ([1, 0.5, True], [1.0, 0.5, 1.0]),
        ((1, 2), [1, 2]),
        ([1, "a"], '[1, "a"]'),
        (None, "null"),
        ({"a": 1}, '{"a": 1}'),
        (object, f'"{object}"'),
    ],
)
def test_values_that_opentelemetry_does_not_take_become_json(value: Any, clean: Any) -> None:
    found = attributes.sanitize_attributes({"k": value})["k"]
    assert found == clean and (not isinstance(found, list) or [type(i) for i in found] == [type(i) for i in clean])


def test_without_force_a_value_that_is_not_json_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="'k'"):
        attributes.sanitize_attributes({"k": object}, force=False)
    with pytest.raises(ValueError, match="int, str"):
        attributes.sanitize_list_attribute_sanity([1, "a"])


def test_tags_and_links_round_trip() -> None:
    tags = attributes.make_tag_attributes(["model:x", "good"])
    assert tags == {f"{conventions.TAG}.0": "model:x", f"{conventions.TAG}.1": "good"}
    assert agl.extract_tags_from_attributes({**tags, "other": 1}) == ["model:x", "good"]
    links = attributes.make_link_attributes({"gen_ai.response.id": "r-1", "span_id": "ab" * 8})
    assert links[f"{conventions.LINK}.1.key_match"] == "span_id"
    assert [(link.key_match, link.value_match) for link in agl.extract_links_from_attributes(links)] == [
        ("gen_ai.response.id", "r-1"),
        ("span_id", "ab" * 8),
    ]
    assert agl.extract_tags_from_attributes({}) == agl.extract_links_from_attributes({}) == []
    with pytest.raises(ValueError, match="'n'"):
        attributes.make_link_attributes({"n": 1})  # type: ignore[dict-item]  # what untyped callers do


def test_linked_spans_match_every_link() -> None:
    spans = [
        Span.from_attributes(attributes={"k": key, "n": 1}, trace_id="aa" * 16, span_id=span * 8)
        for key, span in (("x", "01"), ("y", "02"))
    ]
    link = agl.LinkPydanticModel
    assert agl.query_linked_spans(spans, [link(key_match="k", value_match="x")]) == spans[:1]
    assert agl.query_linked_spans(spans, [link(key_match="trace_id", value_match="aa" * 16)]) == spans
    both = [link(key_match="span_id", value_match="02" * 8), link(key_match="k", value_match="x")]
    assert agl.query_linked_spans(spans, both) == []
    assert agl.query_linked_spans(spans, []) == spans
