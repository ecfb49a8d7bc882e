from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest

from agl_otel.algorithms.grpo import wire
from agl_otel.algorithms.grpo.generate import FinishReason, Row, Sampling
from agl_otel.algorithms.grpo.policy import Policy
from agl_otel.algorithms.grpo.tools import read_calls
from agl_otel.algorithms.grpo.wire import Reply, parse, parse_scoring
from agl_otel.algorithms.options import MOST_TEMPERATURE
from agl_otel.errors import UsageError
from agl_otel.types.sampling import all_parameters

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "digit 7"}]
CALLING = 'I ask.<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * 4"}}\n</tool_call>'


def test_defaults_are_those_of_openai() -> None:
    request = parse({"model": "policy", "messages": MESSAGES, "user": "somebody", "stop": None, "presence_penalty": 0})
    assert (request.n, request.temperature, request.top_p, request.max_tokens, request.stream) == (1, 1.0, 1.0, None, False)
    assert request.sampling(10) == Sampling(10)


@pytest.mark.parametrize(("given", "read"), [("x", ("x",)), (["x", "yz"], ("x", "yz")), ([], ()), (None, ())])
def test_stop_is_a_string_or_several(given: Any, read: tuple[str, ...]) -> None:
    assert parse({"messages": MESSAGES, "stop": given}).sampling(10).stop == read


def test_all_sampling_fields_are_sent_by_algorithms() -> None:
    numbers = {name for name, values in wire.NEUTRAL.items() if any(isinstance(value, int) for value in values)}
    assert numbers | {"temperature", "top_p", "max_tokens"} == set(all_parameters(1.0, 64))
    for temperature in (0.5, MOST_TEMPERATURE):
        request = parse({"messages": MESSAGES, **all_parameters(temperature, 64)})
        assert request.sampling(100) == Sampling(64, temperature=temperature)


def test_the_newer_token_limit_takes_precedence_and_is_bounded() -> None:
    request = parse({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 9})
    assert request.sampling(100).max_tokens == 9
    assert request.sampling(4).max_tokens == 4


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "digit "}, {"type": "text", "text": "7"}]
    assert parse({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "digit 7"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"temperature": 5.1}, "temperature must be a number from 0 to 5"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n must be"),
        ({"n": 1.5}, "n must be"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ["x", 1]}, "stop must be a string or a list of strings"),
        ({"stop": 7}, "stop must be a string or a list of strings"),
        ({"stop": ["x", ""]}, "none of them empty"),
        ({"top_k": 3}, "top_k is not supported"),
        ({"tools": [{}]}, r"tools\[0\] must be"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice is not supported"),
        ({"top_kk": 3}, "unknown fields: top_kk"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_invalid_or_unsupported_fields_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse({"messages": MESSAGES, **change})


def test_a_body_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(UsageError, match="JSON object"):
        parse([1])


SCORED: dict[str, Any] = {"model": "policy", "prompt": [1, 2], "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 1.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({name: value}, "only scores a prompt") for name, value in {"echo": False, "max_tokens": 5, "logprobs": 5, "n": 2}.items()),
        ({"temperature": 0.7}, "only scores a prompt"),
        ({"prompt": "a text"}, "only scores a prompt"),
        ({"prompt": []}, "only scores a prompt"),
        ({"prompt": [1, "2"]}, "prompt must be a list of token ids"),
        ({"suffix": "x"}, "unknown fields: suffix"),
    ],
)
def test_completions_only_score_prompts_of_token_ids(change: dict[str, Any], named: str) -> None:
    assert parse_scoring(SCORED) == [1, 2]
    with pytest.raises(UsageError, match=named):
        parse_scoring(SCORED | change)


def test_chunks_add_up_to_the_response(policy: Policy) -> None:
    body = {"messages": MESSAGES, "n": 2, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = parse(body)
    rows = [Row([1, 2], Sampling(3), random.Random(0), tokens=[10, 11, 12], logprobs=[-1.0, -2.0, -3.0], finish_reason="length")] * 2
    reply = Reply(request, rows, "policy", policy.decode)
    chunks = [reply.first_chunk(), *reply.next_chunks([1, 0]), *reply.next_chunks([3, 3]), *reply.next_chunks([3, 3])]
    whole = reply.whole()
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == whole["choices"][index]["message"]["content"]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == [10, 11, 12]
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert entries == whole["choices"][index]["logprobs"]["content"]
        assert [choice["finish_reason"] for choice in mine][-1] == "length"
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [1, 2]
    last = reply.last_chunk()
    assert last is not None
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_text_ends_before_a_stop_string_and_is_never_streamed_past_its_start(policy: Policy, finish: FinishReason) -> None:
    ids = policy.tokenizer("one two END", add_special_tokens=False)["input_ids"]
    stop = ["NONE", "END"] if finish == "stop" else ["ENDED"]
    request = parse({"messages": MESSAGES, "stop": stop, "return_token_ids": True, "logprobs": True})
    row = Row([1], request.sampling(100), random.Random(0), tokens=ids, logprobs=[-0.5] * len(ids))
    reply, chunks = Reply(request, [row], "policy", policy.decode), list[dict[str, Any]]()
    for ready in range(1, len(ids) + 1):
        row.finish_reason = finish if ready == len(ids) else None
        chunks += reply.next_chunks([ready])
    (whole,) = reply.whole()["choices"]
    assert whole["message"]["content"] == ("one two " if finish == "stop" else "one two END")
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"]["content"] for choice in streamed) == whole["message"]["content"]
    assert [token for choice in streamed for token in choice["token_ids"]] == whole["token_ids"] == ids
    assert len(whole["logprobs"]["content"]) == len(ids) and whole["finish_reason"] == streamed[-1]["finish_reason"] == finish


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def finished_row(policy: Policy, prompt: list[int], text: str) -> Row:
    row = Row(prompt, Sampling(100), random.Random(0))
    row.tokens = [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
    row.logprobs, row.finish_reason = [-0.5] * len(row.tokens), "stop"
    return row


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_has_openais_format_and_the_next_prompt_continues_it(policy: Policy, stream: bool) -> None:
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = QWEN
    knowing = dataclasses.replace(policy, tokenizer=tokenizer)
    request = parse({"messages": MESSAGES, "tools": [TOOL], "stream": stream})
    row = finished_row(knowing, knowing.prompt_ids(request.messages, request.tools), CALLING)
    reply = Reply(request, [row], "policy", knowing.decode)
    if stream:
        chunks = [chunk for ready in (3, len(row.tokens)) for chunk in reply.next_chunks([ready])]
        choice, message = chunks[-1]["choices"][0], chunks[-1]["choices"][0]["delta"]
        assert chunks[0]["choices"][0]["delta"] == {"content": ""} and message["tool_calls"][0].pop("index") == 0
    else:
        choice = reply.whole()["choices"][0]
        message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I ask.")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "calculate", "arguments": '{"expression": "3 * 4"}'}
    replies = [{"role": "assistant", **message}, {"role": "tool", "tool_call_id": call["id"], "content": "12"}]
    again = parse({"messages": [*MESSAGES, *replies], "tools": [TOOL]})
    assert knowing.prompt_ids(again.messages, again.tools)[: len(row.prompt) + len(row.tokens)] == row.prompt + row.tokens


def test_a_reply_has_no_tool_call_without_tools_or_if_it_is_malformed(policy: Policy) -> None:
    row = finished_row(policy, [1], CALLING)
    for asked in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message = Reply(parse({"messages": MESSAGES, **asked}), [row], "policy", policy.decode).whole()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALLING}
    broken = "<tool_call>{'name': }</tool_call>"
    assert read_calls(broken, "call") == (broken, [])
    assert read_calls('<tool_call>{"name": 3}</tool_call>', "call") == ('<tool_call>{"name": 3}</tool_call>', [])


CALL = '<tool_call>\n{"name": "f"}\n</tool_call>'


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>" + " " * 100, "<tool_call>\n", "<tool_call>{}"])
def test_calls_that_are_never_closed_are_read_in_one_pass(piece: str) -> None:
    """Not all that follows once more from each of them: such a test would not end."""
    broken = piece * 200_000
    assert read_calls(broken, "call") == (broken, [])
    text, calls = read_calls(CALL + broken, "call")
    assert text == broken.strip() and len(calls) == 1


def test_blanks_within_a_call_are_read_once() -> None:
    blanks = " " * 2_000_000
    assert read_calls(f"<tool_call>{blanks}x{blanks}x{blanks}</tool_call>{CALL}", "call")[1][0]["function"]["name"] == "f"


def test_tools_are_refused_if_the_chat_template_ignores_them(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(UsageError, match="does not support tools"):
        policy.prompt_ids(MESSAGES, [TOOL])
