"""Tasks that are made of a product's conversations, and on which side of a search they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_otel.adapters.traffic import EXAMPLE, LEFT_OUT, is_validated_on, task_of
from agl_otel.types import Span
from agl_otel.types.spans import Event
from agl_otel_hook import conventions
from tests.unit.adapters.spans import proxy_call, span

SYSTEM = {"role": "system", "content": "answer"}


def call(at: float, *said: tuple[str, str], reply: str, agent: str = "") -> Span:
    messages, answer = (
        [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in each] for each in (said, [("assistant", reply)])
    )
    given: dict[str, Any] = {
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps(answer),
        conventions.LLM_CALL: int(at),
        **({"gen_ai.agent.name": agent} if agent else {}),
    }
    return proxy_call(f"s{at}", at, at + 1, **given)


def corrected(on: Span, text: str, *, source: str = "users", response: str = "", at: float = 5.0) -> Span:
    given = {
        conventions.FEEDBACK_ID: f"{source} {response} {at}", conventions.FEEDBACK_CORRECTION: text, conventions.FEEDBACK_SOURCE: source,
        **({conventions.RESPONSE_ID: response} if response else {}),
    }  # fmt: skip
    event = Event(name=conventions.EVALUATION, attributes=given, timestamp=at, time_unix_nano=int(at * 1e9), is_record=True)
    return on.model_copy(update={"events": [*on.events, event]})


FIRST = call(1.0, ("system", "answer"), ("user", "3"), reply="9")
SECOND = call(3.0, ("system", "answer"), ("user", "3"), ("assistant", "9"), ("user", "and 4?"), reply="5")


def test_a_correction_is_what_should_have_been_answered() -> None:
    expected = {"input": "3", "messages": [SYSTEM, {"role": "user", "content": "3"}], "expected": "4"}
    for is_best in (False, True):
        assert task_of([corrected(FIRST, "4")], is_best=is_best) == expected
    assert {*expected} == {*EXAMPLE}


def test_the_last_reply_is_what_should_have_been_answered_where_no_reward_is_higher() -> None:
    found = task_of([FIRST, SECOND], is_best=True)
    assert isinstance(found, dict) and (found["input"], found["expected"]) == ("and 4?", "5")
    assert [message["content"] for message in found["messages"]] == ["answer", "3", "9", "and 4?"]
    assert task_of([FIRST, SECOND], is_best=False) == "no_answer"


def test_a_correction_of_one_call_makes_a_task_of_that_call() -> None:
    found = task_of([corrected(FIRST, "4", response="id-s1.0"), SECOND], is_best=True)
    assert isinstance(found, dict) and (found["input"], found["expected"]) == ("3", "4")


def test_only_corrections_of_the_sources_that_count_are_taken() -> None:
    spans = [corrected(corrected(FIRST, "4"), "5", source="eve", at=6.0)]
    assert [
        each["expected"] for sources in ((), ("users",)) if isinstance(each := task_of(spans, is_best=False, sources=sources), dict)
    ] == ["5", "4"]
    assert task_of(spans, is_best=False, sources=("others",)) == "no_answer"


def test_only_calls_of_the_agents_that_are_meant_count() -> None:
    spans = [call(1.0, ("user", "a"), reply="b", agent="writer"), call(3.0, ("user", "c"), reply="d", agent="router")]
    found = task_of(spans, is_best=True, agent_match="writer")
    assert isinstance(found, dict) and (found["input"], found["expected"]) == ("a", "b")


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([span("work", 1.0, 2.0)], "no_call"),
        ([], "no_call"),
        ([call(1.0, ("system", "answer"), reply="9")], "no_text"),
        ([call(1.0, ("user", "3"), reply=" ")], "no_text"),
    ],
)
def test_what_makes_no_task_is_named(spans: list[Span], why: str) -> None:
    assert task_of(spans, is_best=True) == why and why in LEFT_OUT


def test_equal_questions_are_on_one_side_and_about_half_of_the_others_on_each() -> None:
    def asked(text: str, **more: Any) -> bool:
        return is_validated_on({"input": text, **more})

    assert all(asked(str(number), expected="a") == asked(str(number), expected="b", messages=[SYSTEM]) for number in range(50))
    assert 450 < sum(asked(f"question {number}") for number in range(1000)) < 550
