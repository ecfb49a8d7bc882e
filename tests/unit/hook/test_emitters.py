from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agl_otel.spans import emitted
from agl_otel.types import SpanCoreFields
from agl_otel_hook import conventions, emit
from agl_otel_hook.attributes import flatten_attributes


def test_a_number_is_the_primary_reward() -> None:
    span = emit.emit_reward(True, propagate=False)
    assert (span.name, span.attributes) == (
        conventions.SPAN_ANNOTATION,
        {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): 1.0},
    )
    assert emitted.get_reward_value(span) == 1.0


def test_a_scalar_of_numpy_is_a_number_and_an_array_none() -> None:
    """numpy.float32 is no float of Python."""
    halves: list[Any] = [np.float32(0.5), np.array(0.5, np.float16)]
    others: list[Any] = [np.bool_(True), np.int64(2), np.array([0.5])]
    for value in halves:
        assert emitted.get_reward_value(emit.emit_reward(value, propagate=False)) == 0.5
        assert emitted.get_reward_value(emit.emit_reward({"a": value}, primary_key="a", propagate=False)) == 0.5
    assert [emitted.get_reward_value(emit.emit_reward(value, propagate=False)) for value in others[:2]] == [1.0, 2.0]
    with pytest.raises(TypeError, match="not ndarray"):
        emit.emit_reward(others[2], propagate=False)


def test_the_primary_dimension_comes_first() -> None:
    span = emit.emit_reward(
        {"style": 0.5, "correct": 1, "short": 0}, primary_key="correct", attributes={"k": {"a": [1, 2]}}, propagate=False
    )
    assert [(r.name, r.value) for r in emitted.get_rewards_from_span(span)] == [("correct", 1.0), ("style", 0.5), ("short", 0.0)]
    assert span.attributes["k.a"] == [1, 2]


@pytest.mark.parametrize(
    ("reward", "primary", "error"),
    [("1", None, TypeError), ({"a": 1.0}, None, ValueError), ({"a": 1.0}, "b", ValueError), ({"a": "x"}, "a", ValueError)],
)
def test_an_invalid_reward_is_rejected(reward: Any, primary: str | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        emit.emit_reward(reward, primary_key=primary, propagate=False)


def test_objects_are_encoded_with_their_type() -> None:
    assert emit.emit_object(b"\x00", propagate=False).attributes == {conventions.OBJECT_TYPE: "bytes", conventions.OBJECT_LITERAL: "AA=="}
    assert emit.emit_object([1, {"a": None}], propagate=False).attributes[conventions.OBJECT_JSON] == '[1, {"a": null}]'
    with pytest.raises(RuntimeError, match="object"):
        emit.emit_object(object(), propagate=False)


def test_an_invalid_attribute_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"'a\.b'"):
        emit.emit_annotation({"a": {"b": None}}, propagate=False)
    assert flatten_attributes({"a": [1, "x"], "b": [], "c": math.pi}) == {"a.0": 1, "a.1": "x", "c": math.pi}


def test_a_span_without_a_reward_has_no_reward_value() -> None:
    assert emitted.get_reward_value({}) is None
    assert emitted.get_rewards_from_span(emit.emit_message("hello", propagate=False)) == []


def test_returned_fields_include_times_and_status() -> None:
    span = emit.emit_annotation({"a": 1}, False)  # 0.3's callers give propagate by position
    assert (span.status.status_code, span.end_time) == ("OK", span.start_time) and span.start_time
    assert emit.emit_message("hi", {"k": {"n": 1}}, False).status.status_code == "UNSET"


@pytest.mark.parametrize("value", ["text", 3, -0.5, True, False, b"\x00\xff", {"a": [1, None]}, [], None])
def test_an_object_round_trips(value: Any) -> None:
    found = emitted.get_object_value(emit.emit_object(value, {"k": "v"}, propagate=False))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "attributes",
    [{conventions.OBJECT_JSON: "{"}, {conventions.OBJECT_LITERAL: "1", conventions.OBJECT_TYPE: "complex"}],
    ids=["json", "type"],
)
def test_a_malformed_object_raises(attributes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"no JSON|'complex'"):
        emitted.get_object_value(attributes)


def test_no_object_or_message_is_none_and_wrong_types_raise() -> None:
    assert emitted.get_object_value({}) is None is emitted.get_message_value({})
    assert emitted.get_message_value(emit.emit_message("hello", propagate=False)) == "hello"
    with pytest.raises(TypeError, match="int"):
        emitted.get_message_value({conventions.MESSAGE_BODY: 3})
    with pytest.raises(TypeError, match="emit_object"):
        emit.emit_message(3, propagate=False)  # type: ignore[arg-type]  # what untyped callers do
    with pytest.raises(TypeError, match="str"):
        emit.emit_exception("oops", propagate=False)  # type: ignore[arg-type]  # what untyped callers do


def named(name: str, **attributes: Any) -> SpanCoreFields:
    return SpanCoreFields(name=name, attributes=attributes)


@pytest.mark.parametrize(
    ("span", "value"),
    [
        (named(conventions.SPAN_ANNOTATION, reward=0.5), 0.5),  # before 0.3
        (named("other", reward=0.5), None),
        (named(conventions.SPAN_ANNOTATION, reward="much"), None),
        (named("x", **{"agentops.task.output": '{"type": "reward", "value": 1}'}), 1.0),  # AgentOps
        (named("x", **{"agentops.entity.output": '{"type": "reward", "value": null}'}), None),
        (named("x", **{"agentops.entity.output": '{"type": "else", "value": 1}'}), None),
        (named("x", **{"agentops.task.output": "no json"}), None),
    ],
)
def test_rewards_of_older_releases_are_read(span: SpanCoreFields, value: float | None) -> None:
    assert emitted.get_reward_value(span) == value
    assert emitted.is_reward_span(span) is (value is not None)


@pytest.mark.parametrize(
    "attributes",
    [
        {conventions.REWARD: 1.0},
        *({conventions.reward_value_key(0): value, conventions.reward_name_key(0): "primary"} for value in (
            "much", True, " 1", "1_000", "１", None, b"1", [1.0])),
        {conventions.reward_value_key(1): 1.0, conventions.reward_name_key(1): "second"},
        {f"{conventions.REWARD}.{'.'.join(['0'] * 3000)}.value": 1.0},
        {f"{conventions.REWARD}.{'9' * 5000}.value": 1.0},
        {"agentops.task.output": "[" * 100_000},
        {"agentops.task.output": '{"type": "reward", "value": NaN}'},
        {"agentops.task.output": '{"type": "reward", "value": ' + "9" * 4000 + "}"},
    ],
)  # fmt: skip
def test_a_malformed_reward_is_ignored(attributes: dict[str, Any]) -> None:
    assert emitted.get_rewards_from_span(attributes) == []
    assert emitted.get_reward_value(attributes) is None
    assert emitted.find_final_reward([named(conventions.SPAN_ANNOTATION, **{conventions.reward_value_key(0): 0.5}), attributes]) == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, "-inf", 1e300, "9" * 5000])
def test_a_last_reward_that_is_not_usable_is_none_and_no_earlier_one_counts(value: object) -> None:
    last = named(conventions.SPAN_ANNOTATION, **{conventions.reward_value_key(0): value})
    assert emitted.get_rewards_from_span(last) == []
    assert emitted.get_reward_value(last) is None
    assert emitted.find_final_reward([named(conventions.SPAN_ANNOTATION, **{conventions.reward_value_key(0): 0.5}), last]) is None


def test_a_malformed_dimension_does_not_affect_the_others() -> None:
    attributes = {conventions.reward_value_key(0): "0.5", conventions.reward_value_key(1): "much", conventions.reward_value_key(2): 2}
    assert [each.value for each in emitted.get_rewards_from_span(attributes)] == [0.5, 2.0]


def test_the_final_reward_is_the_last_in_the_order_given() -> None:
    spans = [emit.emit_reward(value, propagate=False) for value in (1.0, 0.25)]
    other = emit.emit_message("hi", propagate=False)
    assert emitted.find_reward_spans([other, *spans, other]) == spans
    assert emitted.find_final_reward([*spans, other]) == 0.25
    assert emitted.find_final_reward([other]) is None is emitted.find_final_reward([])


def test_a_reward_given_by_the_runner_takes_precedence() -> None:
    given = emit.emit_reward(0.25, attributes={conventions.REWARD_GIVEN: True}, propagate=False)
    later = emit.emit_reward(1.0, propagate=False)
    assert emitted.find_final_reward([later, given, later]) == 0.25


def test_an_operation_block_records_inputs_and_output() -> None:
    context = emit.operation(propagate=False, name="look", user={"id": 7})
    with pytest.raises(RuntimeError, match="inside"):
        context.set_input(1)
    with context as op:
        op.set_input([1, 2], {"a": None}, query="q")
        with pytest.raises(RuntimeError, match="not ended"):
            op.span()
        op.set_output({"found": [{"n": 1}]})
    assert op.span().attributes == {
        conventions.OPERATION_NAME: "look",
        "user.id": 7,
        f"{conventions.OPERATION_INPUT}.args.0": [1, 2],
        f"{conventions.OPERATION_INPUT}.args.1.a": "null",
        f"{conventions.OPERATION_INPUT}.query": "q",
        f"{conventions.OPERATION_OUTPUT}.found.0.n": 1,
    }
    assert (op.span().name, op.span().status.status_code) == (conventions.SPAN_OPERATION, "OK")
    with pytest.raises(RuntimeError, match="inside"):
        op.set_output(1)


def test_an_operation_has_one_name_and_wraps_functions_only() -> None:
    untyped: Any = emit.operation
    with pytest.raises(ValueError, match="one name"):
        untyped(name="a", **{conventions.OPERATION_NAME: "b"})
    with pytest.raises(ValueError, match="name="):
        untyped("a")
