from __future__ import annotations

import json
from typing import Any

import pytest

from agl_otel.adapters.messages import to_messages
from agl_otel.types import Span


def span(span_id: str = "s1", parent: str | None = None, **attributes: Any) -> Span:
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=1,
        trace_id="t",
        span_id=span_id,
        parent_id=parent,
        name="openai.chat",
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


def test_json_messages_become_a_conversation_with_tool_calls() -> None:
    asked = [
        {"role": "user", "parts": [{"type": "text", "content": "weather?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Rome"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "sunny"}]},
    ]
    answered = [{"role": "assistant", "parts": [{"type": "text", "content": "It is sunny."}], "finish_reason": "stop"}]
    tools = [{"type": "function", "name": "weather", "description": "says it", "parameters": {"type": "object"}}]
    sample = span(
        gen_ai__input__messages=json.dumps(asked),
        gen_ai__output__messages=json.dumps(answered),
        gen_ai__system_instructions=json.dumps([{"type": "text", "content": "Be brief."}]),
        gen_ai__tool__definitions=json.dumps(tools),
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert to_messages([span("other"), sample]) == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "assistant", "content": "It is sunny."},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "description": "says it", "parameters": {"type": "object"}}}],
        }
    ]


def test_flat_attributes_become_a_conversation() -> None:
    sample = span(
        gen_ai__prompt__0__role="system",
        gen_ai__prompt__0__content="Be brief.",
        gen_ai__prompt__1__role="assistant",
        gen_ai__prompt__1__tool_calls__0__id="c1",
        gen_ai__prompt__1__tool_calls__0__name="weather",
        gen_ai__prompt__1__tool_calls__0__arguments='{"city": "Rome"}',
        gen_ai__prompt__2__role="tool",
        gen_ai__prompt__2__tool_call_id="c1",
        gen_ai__prompt__2__content="sunny",
        gen_ai__completion__0__role="assistant",
        gen_ai__completion__0__content="It is sunny.",
        llm__request__functions__0__name="weather",
        llm__request__functions__0__parameters='{"type": "object"}',
    )
    (made,) = to_messages([sample])
    assert [message["content"] for message in made["messages"]] == ["Be brief.", None, "sunny", "It is sunny."]
    assert made["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert made["messages"][2]["tool_call_id"] == "c1"
    assert made["tools"][0]["function"]["parameters"] == {"type": "object"}


def test_tool_calls_missing_from_a_reply_come_from_child_spans() -> None:
    parent = span(gen_ai__prompt__0__role="user", gen_ai__prompt__0__content="weather?", gen_ai__completion__0__content="")
    child = span("s2", "s1", tool__call__id="c1", tool__name="weather", tool__parameters='{"city": "Rome"}')
    (made,) = to_messages([parent, child])
    reply = made["messages"][-1]
    assert (reply["role"], reply["content"], reply["tool_calls"][0]["id"]) == ("assistant", None, "c1")
    assert made["tools"] is None


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.input.messages": "{not json"},
        {"gen_ai.input.messages": '{"role": "user"}'},
        {"gen_ai.prompt.1.role": "user"},
        {"gen_ai.prompt.0.content": "nobody's"},
        {"gen_ai.completion.0.role": "user"},
    ],
)
def test_malformed_attributes_are_logged_with_the_span(attributes: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert to_messages([span(**attributes)]) == []
    (line,) = caplog.records
    assert "span s1" in line.getMessage()
    assert not line.exc_info


def test_the_span_of_a_request_around_a_call_does_not_hide_its_reply() -> None:
    asked = json.dumps([{"role": "user", "content": "digit 7"}])
    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "8"}], "finish_reason": "stop"}])
    request = span("root", **{"gen_ai.input.messages": asked})
    call = span("call", "root", **{"gen_ai.input.messages": asked, "gen_ai.output.messages": said, "gen_ai.response.id": "chatcmpl-1"})
    (found,) = to_messages([request, call])
    assert [message["content"] for message in found["messages"]] == ["digit 7", "8"]
