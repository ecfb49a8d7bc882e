from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.proxy.dialects import DIALECTS, prepare, take_out
from agl_otel.proxy.parts import dump, output_message
from agl_otel.proxy.reply import MAX_EVENT_BYTES, MAX_IDS, Events, Reply, parse_object, payload_of, with_fields
from tests.peak_memory import peak_memory

CHAT, MESSAGES = DIALECTS["chat/completions"], DIALECTS["messages"]


@given(st.lists(st.sampled_from([b"data: {}\n\n", b"data: {}\r\n\r\n", b": ping\n\n", b"data: [DONE]\n\n"])), st.lists(st.integers(0, 60)))
def test_events_are_the_same_wherever_the_stream_is_split(events: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(events) + b"data: rest"
    splitter, seen, at = Events(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        seen += splitter.feed(stream[at:cut])
        at = max(at, cut)
    assert b"".join(seen) + splitter.rest() == stream


class Piece(bytes):
    """Bytes that count what is copied in front of them."""

    copied = 0

    def __radd__(self, before: bytes) -> bytes:
        Piece.copied += len(before)
        return bytes.__add__(before, self)


@pytest.mark.parametrize("line", [b"data: x\n", b"data: x\r\n"])
def test_a_stream_without_a_blank_line_is_not_copied_for_each_piece(line: bytes) -> None:
    splitter, Piece.copied = Events(), 0
    assert not any(splitter.feed(Piece(line)) for _ in range(1000))
    assert splitter.rest() == line * 1000 and Piece.copied == 0


def test_an_event_that_is_too_long_is_passed_on_unread() -> None:
    splitter, piece = Events(), b"x" * (MAX_EVENT_BYTES // 4)
    seen = [splitter.feed(piece) for _ in range(4)]
    assert seen == [[], [], [], []] and splitter.feed(b"y") == [piece * 4 + b"y"] and splitter.rest() == b""


def test_tool_calls_in_pieces_are_joined() -> None:
    reply = Reply()
    for piece in (
        {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "1}"}},
    ):
        CHAT.take(reply, {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    CHAT.take(reply, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    (message,) = json.loads(output_message(reply.choices[0]))
    assert message["parts"] == [{"type": "tool_call", "id": "call_1", "name": "add", "arguments": {"a": 1}}]
    assert message["finish_reason"] == "tool_calls"


def test_completions_carry_prompt_ids_in_their_choices_and_logprobs_as_a_list() -> None:
    reply = Reply()
    choice = {"index": 0, "text": "x", "prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": {"token_logprobs": [-1]}}
    DIALECTS["completions"].take(reply, {"id": "c", "choices": [choice]})
    held = reply.choices[0]
    assert (reply.prompt_token_ids, held.token_ids, held.logprobs, held.logprobs_defect()) == ([1, 2], [3], [-1.0], None)


IDS: list[int] = [1] * (MAX_IDS // 4)


@pytest.mark.parametrize("name", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_more_tokens_than_the_limit_of_a_reply_are_a_defect(name: str, field: str) -> None:
    reply, dialect = Reply(), DIALECTS[name]
    held: Any = IDS if field == "token_ids" else {"token_logprobs": IDS}
    payload = {"choices": [{"index": 0, field: held}, {"index": 1, field: held}], "content": [], "output": [], field: held}
    for _ in range(2 if name == "chat/completions" else 4):
        dialect.take(reply, payload)
    assert not reply.too_many_ids
    for _ in range(3):
        dialect.take(reply, payload)
    assert reply.too_many_ids
    assert sum(len(choice.token_ids) + len(choice.logprobs) for choice in reply.choices.values()) == MAX_IDS


def test_the_token_limit_of_a_prompt_is_that_of_a_reply() -> None:
    reply = Reply()
    CHAT.take(reply, {"prompt_token_ids": IDS * 4})
    assert reply.prompt_token_ids == IDS * 4 and not reply.too_many_ids
    reply = Reply()
    CHAT.take(reply, {"prompt_token_ids": [*IDS * 4, 1]})
    assert reply.prompt_token_ids is None and reply.too_many_ids


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": None},
        {"choices": [None, 1, {"message": 3, "token_ids": ["a"], "logprobs": [1]}]},
        {"choices": [{"logprobs": {"content": [{}]}, "delta": {"tool_calls": [{"function": None}, 4]}}], "usage": 3, "error": "x"},
        {"choices": [{"token_ids": [1, True]}], "prompt_token_ids": "abc"},
        {"choices": [{"logprobs": {"token_logprobs": [10**400]}}]},
    ],
)
def test_malformed_parts_are_skipped(payload: dict[str, Any]) -> None:
    reply = Reply()
    CHAT.take(reply, payload)
    take_out(payload, frozenset({"logprobs", "return_token_ids"}))
    assert reply.prompt_token_ids is None and all(not choice.token_ids and choice.logprobs_defect() for choice in reply.choices.values())


def test_only_results_of_added_fields_are_removed() -> None:
    prepared = prepare(CHAT, {"logprobs": True, "model": "a"}, model=None, sampling={"top_p": 0.5}, extras=CHAT.levels[0])
    extras = {"return_token_ids": True, "return_weight_versions": True}
    assert prepared.added == extras.keys() and prepared.fields == {"top_p": 0.5, **extras}
    payload = {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "logprobs": {"content": []}}]}
    assert take_out(payload, prepared.added) and payload == {"choices": [{"logprobs": {"content": []}}]}
    assert not take_out(payload, prepared.added)


def test_without_capture_nothing_is_added() -> None:
    assert prepare(CHAT, {"model": "a"}, model="b", sampling={}, extras={}).fields == {"model": "b"}


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(["model", '"model":"x"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "stream", '"model']) | st.text(), inner),
    max_leaves=12,
)


@given(
    payload=st.dictionaries(st.sampled_from(["model", "logprobs", "messages"]) | st.text(), JSON),
    fields=st.dictionaries(st.sampled_from(["model", "logprobs", "return_token_ids"]), st.text() | st.booleans(), min_size=1),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_fields_are_set_and_the_rest_is_unchanged(
    payload: dict[str, Any], fields: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    raw = json.dumps(payload, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    assert json.loads(with_fields(raw, payload, fields).decode("utf-8", "surrogatepass")) == payload | fields


def test_setting_fields_keeps_the_spelling_of_the_rest() -> None:
    raw = b' {"model" : "gpt\\"-4", "n":1.50, "messages":[{"content":"\xc3\xa9 \\u00e9"}]}\n'
    set_ = with_fields(raw, json.loads(raw), {"model": "own", "logprobs": True})
    assert set_ == b'{"model" : "own", "n":1.50, "messages":[{"content":"\xc3\xa9 \\u00e9"}],"logprobs":true}'
    assert with_fields(raw, json.loads(raw), {}) is raw
    escaped = b'{"tools":[{"model":"inner"}],"\\u006dodel":"outer"}'
    assert json.loads(with_fields(escaped, json.loads(escaped), {"model": "own"})) == {"tools": [{"model": "inner"}], "model": "own"}
    wide = raw.decode().encode("utf-16")
    assert json.loads(with_fields(wide, json.loads(wide), {"n": 2}))["n"] == 2


@pytest.mark.parametrize("piece", ["x", "\\n", "\\u0041"])
def test_setting_a_field_beside_a_long_string_takes_linear_memory(piece: str) -> None:
    """In the value that is set, and before it; the escape \\u00 causes everything before it to be scanned."""
    raw = f'{{"messages":"{piece * 500_000}\\u0041","model":"{piece * 500_000}"}}'.encode()
    payload = json.loads(raw)
    with peak_memory() as peak:
        assert with_fields(raw, payload, {"model": "own"}).endswith(b'\\u0041","model":"own"}')
    assert peak.bytes < 3 * len(raw)


def test_conversations_follow_the_conventions() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "not json"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    user, assistant, tool = json.loads(dump(CHAT.conversation({"messages": messages})))
    assert user["parts"][0] == {"type": "text", "content": "look"} and user["parts"][1]["type"] == "image_url"
    assert assistant["parts"] == [{"type": "tool_call", "id": "c", "name": "f", "arguments": "not json"}]
    assert tool["parts"] == [{"type": "tool_call_response", "id": "c", "response": "42"}]
    assert DIALECTS["completions"].conversation({"prompt": "hi"})[0]["parts"] == [{"type": "text", "content": "hi"}]


def test_payloads_are_json_objects_only() -> None:
    assert payload_of(b"data: [DONE]\n\n") is None and payload_of(b": ping\n\n") is None and parse_object(b"[1]") is None
    assert payload_of(b'data:{"a":1}\n\n') == {"a": 1}


def chunk(text: str, finish: str | None = None, ids: bool = True) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish, **({"token_ids": [ord(c) for c in text]} if ids else {})}]}


@pytest.mark.parametrize(
    ("chunks", "mixed"),
    [
        ([chunk("a"), chunk("b", "stop"), chunk("c"), chunk("d", "stop")], True),
        ([chunk("a"), chunk("c"), chunk("b", "stop"), chunk("d", "stop")], True),
        ([chunk("a"), chunk("c"), chunk("", "stop"), chunk("", "stop")], True),
        ([chunk("a"), chunk("b", "stop"), chunk(""), {"choices": [], "usage": {"completion_tokens": 2}}], False),
        ([chunk("a", "stop", ids=False), chunk("b", "stop", ids=False)], False),  # as some servers end each chunk
    ],
)
def test_a_stream_continues_after_a_finished_choice_only_with_others(chunks: list[Any], mixed: bool) -> None:
    reply = Reply()
    for each in chunks:
        CHAT.take(reply, each)
    assert reply.mixed_choices is mixed


class Text(str):
    """A string that counts the characters copied in front of it."""

    copied = 0

    def __radd__(self, before: str) -> str:
        Text.copied += len(before)
        return str.__add__(before, self)


@pytest.mark.parametrize("name", ["name", "arguments"])
def test_a_streamed_tool_call_is_not_copied_for_each_piece(name: str) -> None:
    reply, Text.copied = Reply(), 0
    for _ in range(1000):
        CHAT.take(reply, {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {name: Text("x")}}]}}]})
    [part] = json.loads(output_message(reply.choices[0]))[0]["parts"]
    assert part[name] == "x" * 1000 and Text.copied == 0


def test_the_input_of_a_streamed_tool_use_is_not_copied_for_each_piece() -> None:
    reply, Text.copied = Reply(), 0
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    MESSAGES.take(reply, {"type": "content_block_start", "index": 0, "content_block": block})
    for _ in range(1000):
        MESSAGES.take(reply, {"type": "content_block_delta", "index": 0, "delta": {"partial_json": Text("x")}})
    [part] = json.loads(output_message(reply.choices[0]))[0]["parts"]
    assert part["arguments"] == "x" * 1000 and Text.copied == 0
