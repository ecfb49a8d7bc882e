"""Every row of the table of dialects, whole and streamed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from agl_otel.proxy.dialects import DIALECTS, prepare, take_out
from agl_otel.proxy.dialects.dialect import SAMPLING
from agl_otel.proxy.parts import dump, output_message
from agl_otel.proxy.reply import Events, Reply, encoded, payload_of, with_payload
from agl_otel.proxy.steering import LEFT_OUT

RESPONSE = {
    "id": "resp_1",
    "model": "m",
    "status": "completed",
    "prompt_token_ids": [1, 2],
    "token_ids": [3],
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
    ],
    "usage": {"input_tokens": 2, "output_tokens": 1},
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "model": "m",
    "prompt_token_ids": [1, 2],
    "token_ids": [3],
    "content": [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 2, "output_tokens": 1},
}
RESPONSE_EVENTS: list[Any] = [
    {"type": "response.created", "response": {"id": "resp_1", "model": "m", "output": []}},
    {"type": "response.output_item.added", "item": {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}},
    {"type": "response.output_text.delta", "delta": "h"},
    {"type": "response.completed", "response": RESPONSE},
]
MESSAGE_EVENTS: list[Any] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "token_ids": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "c", "name": "f", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    {"type": "message_delta", "token_ids": [3], "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
]
PARTS = [
    {"type": "reasoning", "content": "hm"},
    {"type": "text", "content": "hi"},
    {"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}},
]


@pytest.mark.parametrize(
    ("path", "payloads", "finish"),
    [
        ("responses", [RESPONSE], "stop"),
        ("responses", RESPONSE_EVENTS, "stop"),
        ("messages", [MESSAGE], "tool_calls"),
        ("messages", MESSAGE_EVENTS, "tool_calls"),
    ],
)
def test_whole_and_streamed_answers_give_equal_replies(path: str, payloads: list[Any], finish: str) -> None:
    reply = Reply()
    for payload in payloads:
        DIALECTS[path].take(reply, payload)
    (message,) = json.loads(output_message(reply.choices[0]))
    assert message["parts"] == PARTS and message["finish_reason"] == finish
    assert (reply.prompt_token_ids, reply.choices[0].token_ids, reply.input_tokens, reply.output_tokens) == ([1, 2], [3], 2, 1)
    assert reply.id in ("resp_1", "msg_1") and reply.error is None


@pytest.mark.parametrize(("path", "events"), [("responses", RESPONSE_EVENTS[:3]), ("messages", MESSAGE_EVENTS[:4])])
def test_a_truncated_stream_keeps_what_was_received(path: str, events: list[Any]) -> None:
    reply = Reply()
    for event in events:
        DIALECTS[path].take(reply, event)
    assert "".join(reply.choices[0].text) in ("h", "hi") and reply.choices[0].finish_reason is None


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_ids_are_removed_from_nested_payloads_too(path: str) -> None:
    for payload in (RESPONSE_EVENTS[-1], MESSAGE_EVENTS[0], RESPONSE, MESSAGE):
        copy = json.loads(json.dumps(payload))
        assert take_out(copy, frozenset({"return_token_ids"}))
        assert "token_ids" not in json.dumps(copy)


def test_sampling_parameters_get_each_dialects_names() -> None:
    sampling = {"temperature": 0.5, "max_tokens": 9, "frequency_penalty": 1}
    asked = {"temperature": 0}
    bodies = {path: asked | prepare(dialect, asked, model="m", sampling=sampling, extras={}).fields for path, dialect in DIALECTS.items()}
    assert bodies["chat/completions"] == {**sampling, "temperature": 0, "model": "m"}
    assert bodies["responses"] == {"temperature": 0, "max_output_tokens": 9, "model": "m"}
    assert bodies["messages"] == {"temperature": 0, "max_tokens": 9, "model": "m"}
    assert bodies["embeddings"] == {"temperature": 0, "model": "m"}


def test_conversations_of_all_dialects_have_the_same_form() -> None:
    call, result = (
        {"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}},
        {"type": "tool_call_response", "id": "c", "response": "42"},
    )
    said = {
        "chat/completions": {
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}]},
                {"role": "tool", "tool_call_id": "c", "content": "42"},
            ]
        },
        "responses": {
            "instructions": "be",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
            ],
        },
        "messages": {
            "system": "be",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}]},
            ],
        },
    }
    shown = {path: [message["parts"] for message in DIALECTS[path].conversation(body)] for path, body in said.items()}
    text = [{"type": "text", "content": "be"}], [{"type": "text", "content": "hi"}]
    assert all(parts == [*text, [call], [result]] for parts in shown.values()), shown


WORDS = [
    "type", "choices", "message", "delta", "content",
    "output", "item", "response", "usage", "index",
    "token_ids", "logprobs", "text", "prompt_token_ids", "error",
    "tool_calls", "function", "summary", "content_block", "messages",
    "input", "system", "role", "message_start", "content_block_delta",
    "message_delta", "response.completed", "function_call", "response.output_text.delta", "response.output_item.added",
    "tool_use", "tool_result"
]  # fmt: skip


def anything(random: Random, depth: int) -> Any:
    kind = random.randrange(8 if depth else 5)
    if kind < 5:
        return (None, True, random.randrange(-2, 3), 0.5, random.choice(WORDS))[kind]
    if kind == 5:
        return [anything(random, depth - 1) for _ in range(random.randrange(3))]
    return {random.choice(WORDS): anything(random, depth - 1) for _ in range(random.randrange(1, 6))}


@pytest.mark.parametrize("path", sorted(DIALECTS))
def test_no_json_breaks_a_dialect(path: str) -> None:
    random = Random(path)
    for _ in range(3000):
        payload = {random.choice(WORDS): anything(random, 4) for _ in range(5)}
        reply = Reply()
        DIALECTS[path].take(reply, payload)
        take_out(payload, frozenset({"logprobs", "return_token_ids"}))
        dump(DIALECTS[path].conversation(payload))
        for choice in reply.choices.values():
            output_message(choice)


@pytest.mark.parametrize("ids", [[1, -1], [1 << 31], [1 << 70], ["a"], [True], [1.0], "abc", {"a": 1}])
def test_invalid_token_ids_are_flagged_and_dropped(ids: Any) -> None:
    reply = Reply()
    DIALECTS["chat/completions"].take(reply, {"choices": [{"token_ids": ids}]})
    assert reply.bad_ids and reply.choices[0].token_ids == []


def test_lone_surrogates_reach_the_agent_as_escapes_and_the_span_as_question_marks() -> None:
    payload = json.loads('{"text": "a\\ud83d"}')
    assert json.loads(encoded(payload)) == payload
    assert json.loads(dump([{"role": "user", "parts": [payload]}]))[0]["parts"] == [{"text": "a?"}]


def test_the_text_of_a_span_is_limited_and_notes_what_is_left_out() -> None:
    messages = [{"role": "user", "parts": [{"type": "text", "content": "x" * 400_000}]} for _ in range(5)]
    shown = json.loads(dump(messages))
    assert len(shown) == 3 and "3 messages of 120" in shown[0]["parts"][0]["content"]


def test_events_keep_their_other_lines() -> None:
    event = b'event: message_start\ndata: {"a": 1}\n\n'
    assert payload_of(event) == {"a": 1}
    assert with_payload(event, {"b": "ü"}) == 'event: message_start\ndata: {"b":"ü"}\n\n'.encode()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_event_may_have_fields_after_its_data_and_several_data_lines(end: str) -> None:
    event = end.join(["event: x", 'data: {"a":', "data: 1}", "id: 7", "", ""]).encode()
    assert payload_of(event) == {"a": 1}
    assert with_payload(event, {"b": 2}) == b'event: x\nid: 7\ndata: {"b":2}\n\n'
    assert payload_of(end.join(["data: [DONE]", "id: 8", "", ""]).encode()) is None


@given(st.lists(st.sampled_from(["data: ü€😀\n\n", "data: x\r\n\r\n", ": p\n\n", "event: a\ndata: b\n\n"])), st.lists(st.integers(0, 200)))
def test_events_may_be_split_inside_a_character(events: list[str], cuts: list[int]) -> None:
    whole = [event.encode() for event in events]
    stream = b"".join(whole)
    splitter, seen, at = Events(), [], 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        seen += splitter.feed(stream[at:cut])
        at = cut
    assert seen == whole and splitter.rest() == b""


@pytest.mark.parametrize(
    ("path", "request_type"),
    [
        ("chat/completions", chat_create_params.CompletionCreateParamsStreaming),
        ("completions", completion_create_params.CompletionCreateParamsStreaming),
        ("responses", response_create_params.ResponseCreateParamsStreaming),
        ("embeddings", embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_a_dialects_fields_are_those_of_openais_sdk_and_of_sampling(path: str, request_type: Any) -> None:
    sent: frozenset[str] = request_type.__required_keys__ | request_type.__optional_keys__
    assert sent <= DIALECTS[path].fields | LEFT_OUT
    assert DIALECTS[path].fields - sent <= SAMPLING | {"thinking"}
