"""The translation of generateContent to chat/completions and back: a table of each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.errors import UsageError
from agl_otel.proxy.google.answer import Stream, whole
from agl_otel.proxy.google.request import chat_request

CALL = {"functionCall": {"name": "f", "args": {"x": 1}}}
ANSWER = {"functionResponse": {"name": "f", "response": {"output": "a"}}}


def chat(**asked: Any) -> dict[str, Any]:
    return chat_request("m", asked, streamed=False)


def calls(*identities: str) -> list[dict[str, Any]]:
    return [{"id": each, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}} for each in identities]


@pytest.mark.parametrize(
    ("contents", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (["hi"], [{"role": "user", "content": "hi"}]),
        ([{"parts": [{"text": "a"}, {"text": "b"}]}], [{"role": "user", "content": "a\nb"}]),
        ({"parts": {"text": "a"}}, [{"role": "user", "content": "a"}]),
        ({"text": "a"}, [{"role": "user", "content": "a"}]),
        ([{"role": "model", "parts": [{"text": "a"}, {"text": "b"}]}], [{"role": "assistant", "content": "ab"}]),
        (
            [{"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "a"}]}],
            [{"role": "assistant", "content": "a", "reasoning_content": "hm"}],
        ),
        (
            [{"role": "model", "parts": [CALL, CALL]}, {"role": "user", "parts": [{"text": "and"}, ANSWER, ANSWER]}],
            [
                {"role": "assistant", "content": None, "tool_calls": calls("call_1", "call_2")},
                {"role": "tool", "tool_call_id": "call_1", "content": "a"},
                {"role": "tool", "tool_call_id": "call_2", "content": "a"},
                {"role": "user", "content": "and"},
            ],
        ),
        (
            [
                {"role": "model", "parts": [{"function_call": {"id": "9", "name": "f", "args": {"x": 1}}}]},
                {"role": "function", "parts": [{"function_response": {"id": "9", "name": "f", "response": {"a": "ü"}}}]},
            ],
            [
                {"role": "assistant", "content": None, "tool_calls": calls("9")},
                {"role": "tool", "tool_call_id": "9", "content": '{"a": "ü"}'},
            ],
        ),
        (
            [{"parts": [{"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                }
            ],
        ),
    ],
)
def test_contents_become_messages(contents: Any, messages: list[Any]) -> None:
    assert chat(contents=contents)["messages"] == messages


def test_answers_in_reverse_order_are_found_at_once() -> None:
    many = range(100_000)  # a search through the open calls for each would take minutes
    made = [{"functionCall": {"name": "f", "id": f"c{number}"}} for number in many]
    answers = [{"functionResponse": {"name": "f", "id": f"c{number}", "response": {}}} for number in reversed(many)]
    unnamed = {"functionResponse": {"name": "f", "response": {}}}
    asked = [{"role": "model", "parts": [*made, CALL]}, {"parts": [*answers, unnamed]}]
    said, *answered = chat(contents=asked)["messages"]
    identities = [call["id"] for call in said["tool_calls"]]
    assert [message["tool_call_id"] for message in answered] == [*reversed(identities[:-1]), identities[-1]]


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ({"generation_config": {"top_p": 0.5, "stop_sequences": ["x"], "candidateCount": 2}}, {"top_p": 0.5, "stop": ["x"], "n": 2}),
        ({"generationConfig": {"responseMimeType": "application/json"}}, {"response_format": {"type": "json_object"}}),
        (
            {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT", "enum": ["A"]}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object", "enum": ["A"]}}}},
        ),
        (
            {
                "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
            },
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}, "safetySettings": [{}]}, {}),
    ],
)
def test_settings_become_those_of_chat_completions(asked: dict[str, Any], held: dict[str, Any]) -> None:
    assert chat(contents="x", **asked) == {"model": "m", "messages": [{"role": "user", "content": "x"}], **held}


def _choice(**choice: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "stop", **choice}


@pytest.mark.parametrize(
    ("choice", "parts", "finish"),
    [
        ({"message": {"content": "a", "reasoning_content": "hm"}}, [{"text": "hm", "thought": True}, {"text": "a"}], "STOP"),
        ({"message": {"content": "a"}, "finish_reason": "length"}, [{"text": "a"}], "MAX_TOKENS"),
        ({"message": {"content": "a"}, "finish_reason": "strange"}, [{"text": "a"}], "OTHER"),
        (
            {"message": {"content": None, "tool_calls": calls("7")}, "finish_reason": "tool_calls"},
            [{"functionCall": {"id": "7", "name": "f", "args": {"x": 1}}}],
            "STOP",
        ),
        (
            {"message": {"tool_calls": [{"id": "7", "function": {"name": "f", "arguments": ""}}]}},
            [{"functionCall": {"id": "7", "name": "f", "args": {}}}],
            "STOP",
        ),
        ({"message": {"tool_calls": [{"id": "7", "function": {"name": "f", "arguments": "{"}}]}}, [], "MALFORMED_FUNCTION_CALL"),
        ({"message": {"tool_calls": [{"id": "7", "function": {"name": "f", "arguments": "[1]"}}]}}, [], "MALFORMED_FUNCTION_CALL"),
    ],
)
def test_a_choice_becomes_a_candidate(choice: dict[str, Any], parts: list[Any], finish: str) -> None:
    (found,) = whole({"id": "c", "model": "m", "choices": [_choice(**choice)]})["candidates"]
    assert (found["content"], found["finishReason"]) == ({"role": "model", "parts": parts}, finish)


def _events(stream: Stream, *chunks: dict[str, Any]) -> list[dict[str, Any]]:
    sent = b"".join([*map(stream.add, chunks), stream.end(), stream.end()])
    return [json.loads(line.removeprefix(b"data: ")) for line in sent.split(b"\r\n\r\n") if line]


def test_a_stream_sends_texts_at_once_and_calls_with_the_end() -> None:
    def delta(finish: str | None = None, **said: Any) -> dict[str, Any]:
        return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": said, "finish_reason": finish}]}

    pieces = [{"index": 0, "id": "7", "function": {"name": "f", "arguments": '{"x"'}}, {"index": 0, "function": {"arguments": ": 1}"}}]
    usage = {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 1}, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    events = _events(
        Stream(),
        delta(content="", role="assistant"),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta(tool_calls=[pieces[0]]),
        delta("tool_calls", tool_calls=[pieces[1]]),
        {"id": "c", "model": "m", "choices": [], "usage": usage},
    )
    assert [event["candidates"][0]["content"]["parts"] for event in events] == [
        [{"text": "hm", "thought": True}], [{"text": "a"}], [{"functionCall": {"id": "7", "name": "f", "args": {"x": 1}}}],
    ]  # fmt: skip
    assert events[-1]["candidates"][0]["finishReason"] == "STOP" and events[-1]["responseId"] == "c"
    assert events[-1]["usageMetadata"] == {
        "promptTokenCount": 5, "candidatesTokenCount": 3, "totalTokenCount": 9, "thoughtsTokenCount": 1, "cachedContentTokenCount": 2,
    }  # fmt: skip


def test_a_stream_that_ends_without_a_reason_has_no_last_event() -> None:
    assert len(_events(Stream(), {"choices": [{"index": 0, "delta": {"content": "a"}}]})) == 1
    (failed,) = _events(Stream(), {"error": {"message": "it broke"}})
    assert failed["error"] == {"code": 500, "message": "it broke", "status": "INTERNAL"}


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["contents", "parts", "role", "text", "functionCall", "functionResponse", "name", "args", "tools", "mode"])
            | st.sampled_from(["functionDeclarations", "toolConfig", "functionCallingConfig", "generationConfig", "systemInstruction"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(asked=st.dictionaries(st.sampled_from(["contents", "tools", "toolConfig", "generationConfig", "systemInstruction"]), JSON))
def test_a_request_of_any_form_is_translated_or_refused(asked: dict[str, Any]) -> None:
    try:
        found = chat_request("m", asked, streamed=True)
    except UsageError:
        return
    assert json.loads(json.dumps(found)) == found
