"""Attribute values survive the conversion to text and back exactly, with their types."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from agl_otel.collector.values import REPEATED, logprobs, to_map, token_ids
from agl_otel.traces.attributes import typed

VECTORS = Path(__file__).parents[3] / "collector" / "conformance" / "values" / "values.json"
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(TEXT, st.booleans(), INT64, st.floats(), st.binary(max_size=8), st.none())
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8)


def any_value(value: Any) -> AnyValue:
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
        case _:
            return AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key=key, value=any_value(item)) for key, item in value.items()]))


def shape(value: Any) -> Any:
    """Return a form that is equal only for the same value and type (nan is nan, 1 is not 1.0, -0.0 is not 0.0)."""
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, float):
        return ("float", "nan") if math.isnan(value) else ("float", value, math.copysign(1.0, value))
    return type(value).__name__, value


@given(
    st.dictionaries(TEXT | st.sampled_from(["resource:a", "event.0:b", "span:c", "link.12:d"]), VALUES, max_size=5),
    st.sampled_from(["", "resource:"]),
)
def test_every_value_is_restored_with_its_type(values: dict[str, Any], prefix: str) -> None:
    types: dict[str, str] = {}
    texts = to_map([KeyValue(key=key, value=any_value(value)) for key, value in values.items()], types, prefix)
    assert all(isinstance(text, str) for text in texts.values())
    assert shape(typed(texts, types, prefix)) == shape(values)


@given(st.lists(st.integers(0, 2**40), min_size=16, max_size=40) | st.lists(st.floats(), min_size=16, max_size=40))
def test_long_lists_are_restored_exactly(items: list[Any]) -> None:
    types: dict[str, str] = {}
    texts = to_map([KeyValue(key="k", value=any_value(items))], types)
    assert shape(typed(texts, types)) == shape({"k": items})


@given(
    st.lists(st.one_of(INT64, st.text(max_size=3), st.floats(), st.booleans(), st.none(), st.binary(max_size=3)), max_size=12)
    | st.lists(st.integers(0, 2**32 - 1), max_size=50)
)
def test_only_lists_of_token_ids_are_read_as_such(items: list[Any]) -> None:
    fits = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 for item in items)
    assert token_ids(any_value(items)) == (items if fits else None)


@given(st.lists(st.floats(width=32) | st.floats(), max_size=30))
def test_logprobs_are_rounded_to_float32_unless_one_is_not_finite_then(numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        small = [float(np.float32(number)) for number in numbers]
    expected = (small, small == numbers) if all(map(math.isfinite, small)) else ([], False)
    assert logprobs(any_value(numbers)) == expected


@pytest.mark.parametrize("value", ["text", 3, [1, 2.0], ["a"], {"a": 1}])
def test_other_kinds_are_neither_token_ids_nor_logprobs(value: Any) -> None:
    assert token_ids(any_value(value)) is None
    assert logprobs(any_value(value)) == ([], False)


def test_the_first_value_of_a_repeated_key_counts() -> None:
    types: dict[str, str] = {}
    twice = [KeyValue(key="k", value=any_value("first")), KeyValue(key="k", value=any_value(2))]
    counts: Counter[str] = Counter()
    assert to_map(twice, types, counts=counts) == {"k": "first"}
    assert (types, counts) == ({}, {REPEATED: 1})


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text())["vectors"], ids=lambda vector: vector["name"])
def test_the_golden_vectors(vector: dict[str, Any]) -> None:
    value = json_format.ParseDict(vector["value"], AnyValue())
    types: dict[str, str] = {}
    counts: Counter[str] = Counter()
    assert to_map([KeyValue(key="k", value=value)], types, counts=counts) == {"k": vector["text"]}
    assert types == ({"k": vector["type"]} if vector["type"] else {})
    assert counts[REPEATED] == vector.get("repeated", 0)


def test_ambiguous_values_stored_by_an_earlier_release_are_read() -> None:
    text = '{"kvlistValue":{"values":[{"key":"b","value":{"bytesValue":"AAE="}},{"key":"d","value":{"doubleValue":"NaN"}}]}}'
    assert shape(typed({"k": text}, {"k": "otlp"})) == shape({"k": {"b": b"\0\1", "d": math.nan}})
