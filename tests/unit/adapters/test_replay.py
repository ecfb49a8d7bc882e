"""Tools that are answered from a stored attempt, and what becomes of tool calls that a model makes in place of recorded ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agl_otel.adapters.replay import Miss, Recorded, Step, Tally, ToolCall, compared, steps_of
from agl_otel.types import Span
from agl_otel.types.sampling import Contract
from agl_otel_hook import conventions
from tests.unit.adapters.spans import proxy_call, span

Json = dict[str, Any]


def asks(*calls: tuple[str, str, str]) -> Json:
    """An assistant's message that calls tools: (id, name, arguments)."""
    return {"role": "assistant", "parts": [{"type": "tool_call", "id": i, "name": n, "arguments": a} for i, n, a in calls]}


def says(role: str, text: str) -> Json:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def returned(call_id: str, result: Any) -> Json:
    return {"role": "tool", "parts": [{"type": "tool_call_response", "id": call_id, "response": result}]}


def attempt(*turns: tuple[Sequence[Json], Json], **attributes: Any) -> list[Span]:
    """One model call for each (what is new in its prompt, its reply)."""
    history, spans = list[Json](), list[Span]()
    for number, (new, reply) in enumerate(turns, 1):
        history += new
        messages = {"gen_ai.input.messages": json.dumps(history), "gen_ai.output.messages": json.dumps([reply])}
        own: Json = {conventions.LLM_CALL: number, "gen_ai.response.id": f"r{number}", **messages, **attributes}
        spans.append(proxy_call(f"s{number}", number, number + 0.5, **own))
        history.append(reply)
    return spans


def test_equal_calls_get_their_results_in_order_and_then_a_miss() -> None:
    spans = attempt(
        ([says("user", "?")], asks(("a", "roll", '{"sides": 6, "of": "x"}'))),
        ([returned("a", "4")], asks(("a", "roll", '{"of":"x","sides":6}'), ("b", "now", ""))),  # its server numbers from the start
        ([returned("b", {"hour": 3}), returned("a", "2")], says("assistant", "done")),
    )
    recorded = Recorded.of(spans)
    same = {"of": "x", "sides": 6}
    assert [recorded.answer("roll", same), recorded.answer("roll", json.dumps(same))] == ["4", "2"]
    assert recorded.answer("now", None) == '{"hour": 3}'
    missed = recorded.answer("roll", same)
    assert isinstance(missed, Miss) and str(missed) == 'roll({"of": "x", "sides": 6}) was not recorded: a replay calls no tool'
    assert isinstance(recorded.answer("roll", {"sides": 7}), Miss)
    assert recorded.misses == {ToolCall.of("roll", same): 1, ToolCall.of("roll", {"sides": 7}): 1}


def test_equal_calls_of_two_conversations_have_a_result_each() -> None:
    """As two agents of one attempt: what one prompt repeats of another is told apart from it by the ids of calls."""
    first = attempt(([says("user", "1")], asks(("a", "now", "{}"))), ([returned("a", "one")], says("assistant", "!")))
    second = attempt(([says("user", "2")], asks(("b", "now", "{}"))), ([returned("b", "two")], says("assistant", "!")))
    spans = [*first, *(each.model_copy(update={"span_id": f"2{each.span_id}", "start_time": 9.0}) for each in second)]
    for place, each in enumerate(spans):
        each.attributes["gen_ai.response.id"] = f"r{place}"
    assert dict(Recorded.of(spans).results) == {ToolCall("now", "{}"): ["one", "two"]}


def test_what_messages_lack_is_of_the_spans_of_tools() -> None:
    messages = attempt(([says("user", "?")], asks(("a", "now", "{}"))), ([returned("a", "one")], asks(("b", "now", "{}"))))
    tools = [span(f"t{n}", n, n, **{"gen_ai.tool.name": "now", "gen_ai.tool.call.result": f"{n}"}) for n in (1, 2)]
    assert dict(Recorded.of([*messages, *tools]).results) == {ToolCall("now", "{}"): ["1", "2"]}


def test_examples_in_a_prompt_are_no_results_of_the_attempt() -> None:
    example = [asks(("e", "look", '{"at": "moon"}')), returned("e", "round")]
    spans = attempt(([*example, says("user", "?")], asks(("a", "look", '{"at": "sun"}'))), ([returned("a", "hot")], says("assistant", "!")))
    assert dict(Recorded.of(spans).results) == {ToolCall("look", '{"at": "sun"}'): ["hot"]}


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "look",
            "gen_ai.tool.call.arguments": '{"at":1}',
            "gen_ai.tool.call.result": "x",
        },
        {"openinference.span.kind": "TOOL", "tool.name": "look", "input.value": "{'at': 1}", "output.value": "x"},
    ],
    ids=["OpenTelemetry", "OpenInference"],
)
def test_a_tool_that_no_message_tells_of_is_answered_from_its_span(attributes: Json) -> None:
    tools = [
        span("t2", 2, 3, **{**attributes, next(k for k in attributes if k.endswith(("result", "output.value"))): "y"}),
        span("t1", 1, 2, **attributes),
    ]
    recorded = Recorded.of(tools)
    assert [recorded.answer("look", {"at": 1}), recorded.answer("look", {"at": 1})] == ["x", "y"]


def test_a_step_is_a_call_with_its_prompt_and_what_it_called() -> None:
    tools = json.dumps([{"type": "function", "name": "look", "parameters": {"type": "object"}}])
    spans = attempt(
        ([says("user", "?")], asks(("a", "look", "{}"))),
        ([returned("a", "hot")], says("assistant", "done")),
        **{"gen_ai.tool.definitions": tools, conventions.LLM_SAMPLING: Contract.of({"tool_choice": "required"}, {}).dumps()},
    )
    first, second = steps_of(spans, Counter())
    assert (first.prompt, first.recorded, first.forced) == ([{"role": "user", "content": "?"}], [ToolCall("look", "{}")], True)
    assert first.tools is not None and first.tools[0]["function"]["name"] == "look"
    assert [message["role"] for message in second.prompt] == ["user", "assistant", "tool"] and second.recorded == []


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        (attempt(([says("user", "[masked]")], says("assistant", "!"))), "masked"),
        (attempt(([says("user", "?")], asks(("a", "look", "sha256:" + "0" * 64)))), "masked"),
        (attempt(([says("user", "3 messages of 900 characters are left out")], says("assistant", "!"))), "shortened"),
        (attempt(([], says("assistant", "!"))), "no_prompt"),
        (attempt(([says("user", "?")], says("assistant", "!")), **{conventions.LLM_INCOMPLETE: "upstream_error"}), "incomplete_reply"),
        (attempt(([{"role": "user", "content": "?"}], {"role": "assistant", "tool_calls": [3]})), "unreadable_messages"),
    ],
)
def test_a_call_that_cannot_be_replayed_is_counted(spans: list[Span], why: str) -> None:
    left_out = Counter[str]()
    assert steps_of(spans, left_out) == [] and left_out == {why: 1}


A, B, C = (ToolCall(name, "{}") for name in "abc")


def test_what_becomes_of_calls() -> None:
    assert compared([A, A, B], [A, C, B, B], {A, B}) == [(A, "hit"), (C, "miss"), (B, "hit"), (B, "elsewhere"), (A, "not_made")]


def test_a_tally_counts_model_calls_and_their_tools() -> None:
    tally = Tally()
    steps = [Step([], None, False, recorded) for recorded in ([A, B], [A], [A], [], [], [B])]
    tally.add(("ro-1", "at-1"), steps, [[B, A], [], [C], [], [A], None])
    assert (tally.attempts, tally.calls, tally.compared, tally.differing, tally.text_instead, tally.refused) == (1, 6, 5, 4, 1, 1)
    assert tally.tools == {"a": {"hit": 1, "not_made": 2, "elsewhere": 1}, "b": {"hit": 1, "not_made": 1}, "c": {"miss": 1}}
    assert tally.misses == {C: 1} and tally.share == 0.8


def test_the_digest_does_not_depend_on_the_order_of_attempts_and_does_on_every_call() -> None:
    def digest(order: list[int], made: ToolCall) -> str:
        tally = Tally()
        for number in order:
            tally.add((f"ro-{number}", "at-1"), [Step([], None, False, [A])], [[made if number == 3 else A]])
        return tally.digest

    order = list(range(20))
    shuffled = random.Random(1).sample(order, 20)
    assert digest(order, A) == digest(shuffled, A)
    assert len({digest(order, A), digest(order, B), digest(order, ToolCall("b", '{"x": 1}')), digest(order[1:], A)}) == 4
