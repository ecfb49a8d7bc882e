"""Anthropic's Messages API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agl_otel.proxy.dialects.dialect import SAMPLING, Dialect
from agl_otel.proxy.dialects.openai import HELLO, TOKEN_IDS
from agl_otel.proxy.parts import content_parts, tool_call_part, tool_response_part
from agl_otel.proxy.reply import Choice, Json, Reply, ToolCall, dicts, integer, object_of, string

_USAGE: Final = ("input_tokens", "output_tokens")
_FINISH: Final = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_FIELDS: Final = frozenset(
    {
        *("cache_control", "compaction", "container", "context_management", "diagnostics", "inference_geo", "max_tokens", "mcp_servers"),
        *("messages", "model", "output_config", "output_format", "service_tier", "speed", "stop_sequences", "stream", "system"),
        *("temperature", "thinking", "tool_choice", "tools", "top_p", "user_profile_id"),
    }
)
"""Without `fallbacks`, by which litellm would call other models."""
_SAMPLING: Final = {name: name for name in ("temperature", "top_p", "top_k", "max_tokens")} | {"max_completion_tokens": "max_tokens"}


def take(reply: Reply, payload: Json) -> None:
    """Add a message, or an event of a streamed one, to the reply."""
    kind = string(payload.get("type"))
    if kind in (None, "message", "error"):
        _message(reply, payload)
    elif kind == "message_start":
        _message(reply, object_of(payload.get("message")))
    elif kind == "content_block_start":
        _block(reply.choice(), integer(payload.get("index")) or 0, object_of(payload.get("content_block")))
    elif kind == "content_block_delta":
        _delta(reply.choice(), integer(payload.get("index")) or 0, object_of(payload.get("delta")))
    elif kind == "message_delta":
        reply.head(payload, _USAGE)
        reply.tokens(reply.choice(), payload)
        _finish(reply.choice(), object_of(payload.get("delta")))


def _message(reply: Reply, message: Json) -> None:
    reply.head(message, _USAGE)
    if "content" not in message:
        return
    choice = reply.choice()
    reply.tokens(choice, message)
    for index, block in enumerate(dicts(message.get("content"))):
        _block(choice, index, block)
    _finish(choice, message)


def _block(choice: Choice, index: int, block: Json) -> None:
    if block.get("type") in ("tool_use", "server_tool_use"):
        given = block.get("input") or None  # a stream begins with {} and sends its text in deltas
        choice.tool_calls[index] = ToolCall(block.get("id"), [string(block.get("name")) or ""], given=given)
    else:
        _delta(choice, index, block)


def _delta(choice: Choice, index: int, delta: Json) -> None:
    if text := string(delta.get("text")):
        choice.text.append(text)
    if thinking := string(delta.get("thinking")):
        choice.reasoning.append(thinking)
    piece = string(delta.get("partial_json"))
    call = choice.tool_calls.get(index)
    if piece and call is not None:
        call.arguments.append(piece)


def _finish(choice: Choice, part: Json) -> None:
    reason = string(part.get("stop_reason"))
    choice.finish_reason = _FINISH.get(reason, reason) if reason else choice.finish_reason


def _request_messages(body: Mapping[str, Any]) -> list[Json]:
    system = body.get("system")
    return [*([{"role": "system", "content": system}] if system else []), *dicts(body.get("messages"))]


def _convert(message: Json) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return {"role": message.get("role"), "parts": content_parts(content)}
    parts: list[Json] = []
    for block in dicts(cast("list[Any]", content)):
        kind = block.get("type")
        if kind == "tool_use":
            parts.append(tool_call_part(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "tool_result":
            parts.append(tool_response_part(block.get("tool_use_id"), block.get("content")))
        else:
            parts += content_parts([block])
    return {"role": message.get("role"), "parts": parts}


MESSAGES: Final = Dialect(
    "messages",
    "chat",
    _FIELDS | SAMPLING,
    {TOKEN_IDS: True},
    take,
    _request_messages,
    _convert,
    smallest_request={"messages": HELLO, "max_tokens": 1},
    provider="anthropic",
    sampling=_SAMPLING,
    via_chat=True,
    key_headers=("x-api-key", "authorization"),
)
