"""The translation of generateContent to chat/completions and back: a table of each."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.errors import UsageError
from agl_otel.proxy.google.answer import Stream, error, whole
from agl_otel.proxy.google.models import models
from agl_otel.proxy.google.request import chat_request
from agl_otel.proxy.reply import encoded

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
        (
            {
                "tools": [{"functionDeclarations": [{"name": "f", "response": {"type": "STRING"}}, {"name": "g"}]}],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["g", "f"]}},
            },
            {"tools": [{"type": "function", "function": {"name": each}} for each in "fg"], "tool_choice": "required"},
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}, "safetySettings": [{}]}, {}),
        ({"generationConfig": {"responseLogprobs": False, "responseMimeType": "text/plain", "responseModalities": ["TEXT"]}}, {}),
        ({"generationConfig": {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1}}}, {}),
        (
            {"generationConfig": {"thinkingConfig": {"thinking_budget": 0, "thinkingLevel": "HIGH"}}},
            {"thinking_budget": 0, "reasoning_effort": "high"},
        ),
    ],
)
def test_settings_become_those_of_chat_completions(asked: dict[str, Any], held: dict[str, Any]) -> None:
    assert chat(contents="x", **asked) == {"model": "m", "messages": [{"role": "user", "content": "x"}], **held}


DECLARED = [{"functionDeclarations": [{"name": each} for each in "abc"]}]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "contents must be a list"),
        ({"contents": 5}, "contents must be a list"),
        ({"contents": []}, "contents must be a list"),
        ({"contents": [5]}, "contents must be a JSON object"),
        ({"temperature": 1}, "'temperature'"),
        ({"generationConfig": [{}]}, "generationConfig must be a JSON object"),
        ({"generationConfig": {"topK": 1, "top_k": 2}}, "'topK' twice"),
        ({"generationConfig": {"responseLogprobs": True}}, "'responseLogprobs'"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "not 'text/x.enum'"),
        ({"generationConfig": {"responseSchema": {"type": "STRING"}}}, "need the responseMimeType"),
        (
            {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {}, "responseJsonSchema": {}}},
            "responseSchema or responseJsonSchema",
        ),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "responseModalities"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": "9"}}}, "thinkingBudget must be an integer"),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "HUGE"}}}, "thinkingLevel is one of"),
        ({"tools": DECLARED[0]}, "tools must be a list"),
        ({"tools": [{**DECLARED[0], "googleSearch": {}}]}, "'googleSearch' is Google's own"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "the name of a function"),
        (
            {"tools": DECLARED, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}}},
            "allowedFunctionNames cannot be translated",
        ),
        ({"tools": DECLARED, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["a"]}}}, "allowedFunctionNames cannot be"),
        ({"toolConfig": {"retrievalConfig": {}}}, "'retrievalConfig'"),
        ({"systemInstruction": {"parts": [{"inlineData": {"mimeType": "image/png", "data": "AA"}}]}}, "systemInstruction has 'inlineData'"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        chat(**(asked if not asked or "contents" in asked else {"contents": "x", **asked}))


@pytest.mark.parametrize(
    ("role", "part", "why"),
    [
        ("model", {"executableCode": {"code": "x"}}, "'executableCode'"),
        ("model", {"inlineData": {"mimeType": "image/png", "data": "AA"}}, "not 'inlineData'"),
        ("model", {"functionCall": {"args": {}}}, "the name of a functionCall"),
        ("model", {"functionCall": {"name": "f", "args": [1]}}, "the args of a functionCall"),
        ("user", {"functionCall": {"name": "f"}}, "not 'functionCall'"),
        ("user", {"functionResponse": {"name": "f", "response": {}, "parts": [{}]}}, "a functionResponse has 'parts'"),
        ("user", {"text": "a", "inlineData": {"mimeType": "image/png", "data": "AA"}}, "has inlineData and text"),
        ("user", {"text": 5}, "the text of a part"),
        ("user", {"text": "a", "videoMetadata": {"fps": 1}}, "'videoMetadata'"),
        ("user", {"fileData": {"mimeType": "image/png"}}, "the fileUri of fileData"),
        ("user", {"inlineData": {"mimeType": "image/png"}}, "the data of inlineData"),
        ("user", 5, "a part of contents must be a JSON object"),
    ],
)
def test_a_part_without_a_counterpart_is_refused(role: str, part: Any, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        chat(contents=[{"role": role, "parts": [part]}])


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
        ({"message": {"tool_calls": [{"id": "7", "function": {"name": "f", "arguments": '{"x": NaN}'}}]}}, [], "MALFORMED_FUNCTION_CALL"),
        (
            {"message": {"tool_calls": [{"id": "7", "function": {"name": "f", "arguments": '{"x": [1e999]}'}}]}},
            [],
            "MALFORMED_FUNCTION_CALL",
        ),
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


def test_a_usage_of_another_form_is_read_as_none() -> None:
    odd = {"prompt_tokens": "5", "completion_tokens": 1, "completion_tokens_details": [1], "prompt_tokens_details": "abc"}
    payload = {"choices": [_choice(message={"content": "a"}, delta={"content": "a"})], "usage": odd}
    assert whole(payload)["usageMetadata"] == {"promptTokenCount": 0, "candidatesTokenCount": 1, "totalTokenCount": 1}
    assert _events(Stream(), payload)[-1]["usageMetadata"]["totalTokenCount"] == 1


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "text", "name", "parts"]), inner, max_size=2),
    max_leaves=4,
)
REQUEST: dict[str, Any] = {
    "contents": [
        {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]},
        {"role": "user", "parts": [{"fileData": {"mimeType": "image/png", "fileUri": "https://x"}}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"functionCall": {"id": "1", "name": "f", "args": {"x": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "f", "response": {"output": "a"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "b"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "required": ["x"]}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "topK": 1,
        "responseMimeType": "application/json",
        "responseJsonSchema": {"type": "object"},
        "responseModalities": ["TEXT"],
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 1, "thinkingLevel": "HIGH"},
    },
}
SAID: dict[str, Any] = {"content": "a", "reasoning_content": "b", "tool_calls": [{**calls("1")[0], "index": 0}]}
REPLIED: dict[str, Any] = {
    "id": "c",
    "model": "m",
    "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "completion_tokens_details": {"reasoning_tokens": 1},
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each list and object in `value` with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


@given(place=st.integers(0, len(_places(REQUEST)) - 1), value=JSON)
def test_a_request_of_any_form_is_translated_or_refused(place: int, value: Any) -> None:
    asked = deepcopy(REQUEST)
    holder, key = _places(asked)[place]
    holder[key] = value
    try:
        found = chat_request("m", asked, streamed=True)
    except UsageError:
        return
    assert isinstance(json.loads(encoded(found)), dict)


@given(place=st.integers(0, len(_places(REPLIED)) - 1), value=JSON | st.sampled_from(['{"x": NaN}', "[1]"]))
def test_an_answer_of_any_form_is_translated(place: int, value: Any) -> None:
    payload = deepcopy(REPLIED)
    holder, key = _places(payload)[place]
    holder[key] = value
    json.dumps([whole(payload), error(200, encoded(payload)), _events(Stream(), payload, REPLIED)], allow_nan=False)


@pytest.mark.parametrize("name", [None, "m"])
@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"data": {}}'])
def test_what_is_no_list_of_models_is_an_error_of_the_model_server(body: str, name: str | None) -> None:
    answer = models(web.Response(text=body), name)
    assert answer.status == 502 and "/models is no list" in (answer.text or "")


def test_only_models_with_a_name_are_listed() -> None:
    listed = web.json_response({"data": [{"id": "a"}, {"id": 1}, {}, "b"]})
    assert [each["name"] for each in json.loads(models(listed, None).text or "")["models"]] == ["models/a"]
