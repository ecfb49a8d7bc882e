from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters.messages import to_messages
from agl_otel.adapters.triplets import TracerTraceToTriplet
from agl_otel.proxy.prefixes import MessagePrefixes
from agl_otel.spans.history import INPUT, MAX_CHARACTERS, TOOLS, Place, expand_spans, expand_tools
from agl_otel.types import Span
from agl_otel_hook import conventions
from tests.unit.adapters.spans import call, proxy_call

Message = dict[str, Any]
MESSAGES: Any = st.sampled_from("abc").map(lambda text: {"role": "user", "parts": [{"type": "text", "content": text}]})


def stored(calls: list[list[Message]]) -> list[Span]:
    """The spans of calls as the proxy stores them."""
    prefixes, spans = MessagePrefixes(), list[Span]()
    for number, messages in enumerate(calls, 1):
        base, digests = prefixes.continued("chat", messages)
        prefixes.remember(number, digests)
        new = messages[base[1] :] if base else messages
        named = {conventions.LLM_MESSAGES_CALL: base[0], conventions.LLM_MESSAGES_BEFORE: base[1]} if base else {}
        attributes: dict[str, Any] = {conventions.LLM_CALL: number, INPUT: json.dumps(new), "gen_ai.response.id": f"r{number}", **named}
        spans.append(proxy_call(f"s{number}", number, number + 0.5, **attributes))
    return spans


@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=6), max_size=8), st.randoms(use_true_random=False))
def test_conversations_are_rebuilt_from_spans_in_any_order(calls: list[list[Message]], chance: Any) -> None:
    spans = stored(calls)
    assert all(json.loads(span.attributes[INPUT])[-1:] == messages[-1:] for span, messages in zip(spans, calls, strict=True))
    shuffled = chance.sample(spans, len(spans))
    found = {span.span_id: span.attributes[INPUT] for span in expand_spans(shuffled)}
    for span, messages in zip(spans, calls, strict=True):
        held = found[span.span_id]
        assert (json.loads(held) if isinstance(held, str) else held) == messages


def test_a_repeated_message_is_stored_once() -> None:
    turns = [{"role": "user", "parts": [{"type": "text", "content": str(turn)}]} for turn in range(50)]
    spans = stored([turns[: turn + 1] for turn in range(50)])
    assert [len(json.loads(span.attributes[INPUT])) for span in spans] == [1] * 50


def test_further_choices_and_adapters_get_the_full_history() -> None:
    user, answer, more = (
        {"role": role, "parts": [{"type": "text", "content": text}]} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    spans = stored([[user], [user, answer, more]])
    own: dict[str, Any] = {conventions.LLM_MESSAGES_CALL: 2, conventions.LLM_MESSAGES_BEFORE: 2, conventions.LLM_CHOICE: 1}
    own |= {conventions.LLM_CALL: 2, INPUT: json.dumps([more]), "gen_ai.response.id": "r2"}
    spans.append(proxy_call("other", 3, 4, **own))
    asked = ["a", "b", "c"]
    assert [[m["content"] for m in each["messages"]] for each in to_messages(spans)] == [["a", "hi"], [*asked, "hi"], [*asked, "hi"]]
    triplets = TracerTraceToTriplet(repair_hierarchy=False).adapt(spans)
    assert [[m["content"] for m in triplet.prompt["raw_content"]] for triplet in triplets] == [["a"], asked, asked]


def test_a_call_whose_history_is_missing_has_no_messages() -> None:
    first, second = stored([[{"role": "user", "parts": []}], [{"role": "user", "parts": []}, {"role": "user", "parts": []}]])
    (alone,) = expand_spans([second])
    assert INPUT not in alone.attributes and "gen_ai.output.messages" not in alone.attributes and to_messages([second]) == []
    for wrong in ({INPUT: "{"}, {INPUT: "{}"}, {INPUT: "[]"}, {conventions.PROCESS: "another"}):
        broken = first.model_copy(update={"attributes": {**first.attributes, **wrong}})
        assert INPUT not in expand_spans([broken, second])[1].attributes


def test_spans_of_other_instrumentations_are_unchanged() -> None:
    spans = [call("a", 0, 1), proxy_call("b", 1, 2)]
    assert expand_spans(spans) is spans


def test_tool_definitions_of_an_earlier_call_are_those_of_the_calls_that_refer_to_it() -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    held: list[dict[str, Any]] = [{TOOLS: json.dumps(tools)}, {conventions.LLM_TOOLS_CALL: 1}, {}, {conventions.LLM_TOOLS_CALL: 9}]
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "x"}]}])
    spans = [
        proxy_call(
            f"s{number}", number, number + 0.5, **{conventions.LLM_CALL: number, INPUT: asked, "gen_ai.response.id": f"r{number}"}, **more
        )
        for number, more in enumerate(held, 1)
    ]
    assert [row["tools"] for row in to_messages(spans)] == [tools, tools, None, None]
    assert all(conventions.LLM_TOOLS_CALL not in span.attributes for span in expand_spans(spans))
    places: list[Place] = [("r", "a", "p", number) for number in (1, 2, 2, 3)]
    assert expand_tools(places, ["x", "", "", ""], [0, 1, 1, 0]) == ["x", "x", "x", ""]
    assert expand_tools(places, ["x" * (MAX_CHARACTERS // 2), "", "", ""], [0, 1, 1, 0])[1:] == ["", "", ""]
