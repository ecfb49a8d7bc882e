"""The protocols that the scripted model speaks: a request read, an answer written whole or as the events of a stream. Pure.

Token ids as vLLM gives them for chat completions when asked with `return_token_ids` and `logprobs`. Messages and Responses have no form
of their own for them; there the answer carries `prompt_token_ids`, `token_ids` and `logprobs`, which is what the proxy asks for and reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.matrix.script import Message, Request, Sampled, ToolCall, pieces

Json = dict[str, Any]
Event = tuple[str | None, Json]
"""Its name, where the protocol has them, and its data."""


@dataclass(frozen=True)
class Protocol:
    """One route."""

    path: str
    read: Callable[[Json], Request]
    whole: Callable[[Sampled, str, Json], Json]
    events: Callable[[Sampled, str, Json], Iterator[Event]]
    done: bytes = b""
    """What ends a stream."""


def text_of(content: Any) -> str:
    """The text of a message's content, a string or a list of parts."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text", part.get("content"))) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _logprobs(sampled: Sampled, start: int = 0, end: int | None = None) -> Json:
    found = sampled.logprobs[start:end]
    return {"content": [{"token": "x", "logprob": logprob, "bytes": None, "top_logprobs": []} for logprob in found]}


# --- chat/completions


def _read_chat(body: Json) -> Request:
    messages = [
        Message(
            message["role"],
            text_of(message.get("content")),
            tuple(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()),
        )
        for message in body["messages"]
    ]
    return Request(tuple(messages), tuple(tool["function"]["name"] for tool in body.get("tools") or ()))


def _chat_calls(reply: Message) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}, "index": index}
        for index, call in enumerate(reply.calls)
    ]


def _chat_head(kind: str, answer_id: str, body: Json) -> Json:
    return {"id": answer_id, "object": kind, "created": 1_700_000_000, "model": body["model"]}


def _chat_usage(sampled: Sampled) -> Json:
    given, made = len(sampled.prompt_ids), len(sampled.response_ids)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _whole_chat(sampled: Sampled, answer_id: str, body: Json) -> Json:
    calls = [{name: value for name, value in call.items() if name != "index"} for call in _chat_calls(sampled.reply)]
    message: Json = {"role": "assistant", "content": sampled.reply.text or None, **({"tool_calls": calls} if calls else {})}
    choice: Json = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
    answer = {**_chat_head("chat.completion", answer_id, body), "choices": [choice], "usage": _chat_usage(sampled)}
    if body.get("logprobs"):
        choice["logprobs"] = _logprobs(sampled)
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled.response_ids
        answer["prompt_token_ids"] = sampled.prompt_ids
    return answer


def _chat_deltas(reply: Message) -> list[Json]:
    deltas: list[Json] = [{"content": piece} for piece in pieces(reply.text)]
    for call in _chat_calls(reply):
        said = call["function"]
        deltas.append({"tool_calls": [{**call, "function": {"name": said["name"], "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]} for piece in pieces(said["arguments"])]
    return deltas


def _chat_events(sampled: Sampled, answer_id: str, body: Json) -> Iterator[Event]:
    head = _chat_head("chat.completion.chunk", answer_id, body)
    deltas = [*_chat_deltas(sampled.reply), {}]
    step = -(-len(sampled.response_ids) // len(deltas))
    first: Json = {"prompt_token_ids": sampled.prompt_ids} if body.get("return_token_ids") else {}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    yield None, {**head, **first, "choices": [opening]}
    for place, delta in enumerate(deltas):
        start, end = place * step, (place + 1) * step
        finish = ("tool_calls" if sampled.reply.calls else "stop") if not delta else None
        choice: Json = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = _logprobs(sampled, start, end)
        if body.get("return_token_ids"):
            choice["token_ids"] = sampled.response_ids[start:end]
        yield None, {**head, "choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, {**head, "choices": [], "usage": _chat_usage(sampled)}


# --- responses


def _read_responses(body: Json) -> Request:
    given = body.get("input")
    items: list[Json] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    messages = [Message("system", body["instructions"])] if body.get("instructions") else []
    for item in items:
        messages = _with_item(messages, item)
    tools = [tool.get("name", "") for tool in body.get("tools") or () if tool.get("type") == "function"]
    return Request(tuple(messages), tuple(tools))


def _with_item(messages: Sequence[Message], item: Json) -> list[Message]:
    """The items of one reply make one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return [*messages, Message("tool", text_of(item.get("output")))]
    if kind == "function_call":
        said = Message("assistant", calls=(ToolCall(item["call_id"], item["name"], item["arguments"]),))
    elif kind == "message":
        said = Message(item["role"], text_of(item.get("content")))
    else:
        return list(messages)
    if said.role == "assistant" and messages and messages[-1].role == "assistant":
        last = messages[-1]
        return [*messages[:-1], Message("assistant", last.text + said.text, (*last.calls, *said.calls))]
    return [*messages, said]


def _items(sampled: Sampled, answer_id: str) -> list[Json]:
    items: list[Json] = []
    if sampled.reply.text:
        part = {"type": "output_text", "text": sampled.reply.text, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]})
    for call in sampled.reply.calls:
        held = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"id": f"fc_{call.id}", **held})
    return items


def _response(answer_id: str, body: Json, status: str, items: Sequence[Json], usage: Json | None) -> Json:
    return {
        "id": answer_id, "object": "response", "created_at": 1_700_000_000, "model": body["model"], "status": status, "output": list(items),
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools") or [], "usage": usage, "error": None,
        "incomplete_details": None, "instructions": body.get("instructions"), "metadata": {}, "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip


def _tokens(sampled: Sampled, body: Json) -> Json:
    if not body.get("return_token_ids"):
        return {}
    return {"prompt_token_ids": sampled.prompt_ids, "token_ids": sampled.response_ids, "logprobs": _logprobs(sampled)}


def _whole_response(sampled: Sampled, answer_id: str, body: Json) -> Json:
    given, made = len(sampled.prompt_ids), len(sampled.response_ids)
    usage = {
        "input_tokens": given, "output_tokens": made, "total_tokens": given + made,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {**_response(answer_id, body, "completed", _items(sampled, answer_id), usage), **_tokens(sampled, body)}


def _response_events(sampled: Sampled, answer_id: str, body: Json) -> Iterator[Event]:
    started = _response(answer_id, body, "in_progress", [], None)
    told: list[Json] = [{"type": "response.created", "response": started}, {"type": "response.in_progress", "response": started}]
    for index, item in enumerate(_items(sampled, answer_id)):
        told += _item_events(item, index)
    told.append({"type": "response.completed", "response": _whole_response(sampled, answer_id, body)})
    for number, payload in enumerate(told):
        yield payload["type"], {**payload, "sequence_number": number}


def _item_events(item: Json, index: int) -> Iterator[Json]:
    where = {"output_index": index, "item_id": item["id"]}
    text = item["type"] == "message"
    empty: Json = {"content": []} if text else {"arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty, "status": "in_progress"}}
    if text:
        (part,) = item["content"]
        yield {"type": "response.content_part.added", **where, "content_index": 0, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield {"type": "response.output_text.delta", **where, "content_index": 0, "delta": piece, "logprobs": []}
        yield {"type": "response.output_text.done", **where, "content_index": 0, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **where, "content_index": 0, "part": part}
    else:
        for piece in pieces(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
        yield {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


# --- messages (Anthropic)


def _read_messages(body: Json) -> Request:
    messages = [Message("system", text_of(body["system"]))] if body.get("system") else []
    for message in body["messages"]:
        content = message["content"]
        blocks: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = tuple(ToolCall(block["id"], block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use")
        messages += [Message("tool", text_of(block.get("content"))) for block in blocks if block["type"] == "tool_result"]
        if text or calls:
            messages.append(Message(message["role"], text, calls))
    return Request(tuple(messages), tuple(tool["name"] for tool in body.get("tools") or ()))


def _blocks(reply: Message) -> list[Json]:
    blocks: list[Json] = [{"type": "text", "text": reply.text}] if reply.text else []
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in reply.calls]


def _whole_message(sampled: Sampled, answer_id: str, body: Json) -> Json:
    return {
        "id": answer_id, "type": "message", "role": "assistant", "model": body["model"], "content": _blocks(sampled.reply),
        "stop_reason": "tool_use" if sampled.reply.calls else "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": len(sampled.prompt_ids), "output_tokens": len(sampled.response_ids)}, **_tokens(sampled, body),
    }  # fmt: skip


def _message_events(sampled: Sampled, answer_id: str, body: Json) -> Iterator[Event]:
    whole = _whole_message(sampled, answer_id, body)
    started = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    ended = {name: started.pop(name) for name in ("token_ids", "logprobs") if name in started}
    yield "message_start", {"type": "message_start", "message": started}
    for index, block in enumerate(whole["content"]):
        text = block["type"] == "text"
        empty: Json = {"text": ""} if text else {"input": {}}
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        for piece in pieces(block["text"] if text else json.dumps(block["input"])):
            delta = {"type": "text_delta", "text": piece} if text else {"type": "input_json_delta", "partial_json": piece}
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    usage = {"output_tokens": whole["usage"]["output_tokens"]}
    yield "message_delta", {"type": "message_delta", "delta": stop, "usage": usage, **ended}
    yield "message_stop", {"type": "message_stop"}


PROTOCOLS: Final = (
    Protocol("chat/completions", _read_chat, _whole_chat, _chat_events, done=b"data: [DONE]\n\n"),
    Protocol("responses", _read_responses, _whole_response, _response_events),
    Protocol("messages", _read_messages, _whole_message, _message_events),
)
