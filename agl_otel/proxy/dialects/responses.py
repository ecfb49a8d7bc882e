"""OpenAI's Responses API. Pure.

A stream has the content twice: as deltas, and whole in its last event, which replaces the deltas.

vLLM answers `enable_response_messages` with `input_messages` and `output_messages`, which hold the token ids of the prompt and of the reply
(vLLM pull request 29549). Log-probs are at the text (`include`): of a whole answer those of all tokens, also of thinking and tool calls; a
reply without text has none. A stream has only those of the events with text, and of some twice where an event has more than text: they are
taken where the reply is one text. If vLLM ran tools of its own, the messages have more tokens than `usage` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic_core import from_json

from agl_otel.proxy.dialects.dialect import SAMPLING, Dialect
from agl_otel.proxy.dialects.openai import TOKEN_IDS
from agl_otel.proxy.parts import content_parts, tool_call_part, tool_response_part
from agl_otel.proxy.reply import Choice, Json, Reply, ToolCall, dicts, object_of, string

RAW_MESSAGES: Final = "enable_response_messages"
RAW_FIELDS: Final = ("input_messages", "output_messages")
"""What it adds to an answer."""
INCLUDE: Final = "include"
_LOGPROBS: Final = "message.output_text.logprobs"
_USAGE: Final = ("input_tokens", "output_tokens")
_WHOLE: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}


def take(reply: Reply, payload: Json) -> None:
    """Add a response, or an event of a streamed one, to the reply."""
    kind = payload.get("type")
    if not isinstance(kind, str):
        _whole(reply, payload)
    elif kind in _DELTAS and isinstance(payload.get("delta"), str):
        choice = reply.choice()
        (choice.text if _DELTAS[kind] == "text" else choice.reasoning).append(payload["delta"])
    elif kind == "response.output_item.added":
        _item(reply.choice(), cast("Json", payload["item"]) if isinstance(payload.get("item"), dict) else {})
    elif kind == "error":
        reply.error = string(payload.get("message")) or "error"
    elif isinstance(payload.get("response"), dict):
        response = cast("Json", payload["response"])
        if kind in _WHOLE:
            reply.choices.clear()
            _whole(reply, response, streamed=True)
        else:
            reply.head(response, _USAGE)


def _whole(reply: Reply, response: Json, *, streamed: bool = False) -> None:
    reply.head(response, _USAGE)
    if "output" not in response:
        return
    choice = reply.choice()
    reply.tokens(choice, response)
    _raw_tokens(reply, choice, response, streamed)
    for item in dicts(response.get("output")):
        _item(choice, item)
    status = string(object_of(response.get("incomplete_details")).get("reason")) or string(response.get("status")) or "completed"
    choice.finish_reason = {"completed": "stop", "max_output_tokens": "length"}.get(status, status)


def _raw_tokens(reply: Reply, choice: Choice, response: Json, streamed: bool) -> None:
    """Take the token ids of vLLM's raw messages, and the log-probs of its texts, if the reply has none otherwise."""
    prompt, sampled = (_raw_ids(response.get(name)) for name in RAW_FIELDS)
    if choice.token_ids or not sampled:
        return
    reply.raw_messages = True
    reply.prompt({"prompt_token_ids": prompt})
    texts = texts_of(response)
    told = len(texts) == 1 and not (streamed and len(dicts(response.get("output"))) > 1)
    reply.tokens(choice, {"token_ids": sampled, "logprobs": {"content": dicts(texts[0].get("logprobs")) if told else []}})


def _raw_ids(messages: Any) -> list[Any]:
    ids: list[Any] = []
    for message in cast("list[Any]", messages) if isinstance(messages, list) else ():
        held = _parsed(message) if isinstance(message, str) else message  # some versions of vLLM encode them
        tokens: Any = object_of(held).get("tokens")
        ids += tokens if isinstance(tokens, list) else []
    return ids


def _parsed(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None


def texts_of(payload: Json) -> list[Json]:
    """Return the objects of an answer, or of an event, that may have log-probs."""
    inner = payload.get("response")
    items = [payload.get("item"), *dicts((cast("Json", inner) if isinstance(inner, dict) else payload).get("output"))]
    parts = [payload, payload.get("part"), *(part for item in dicts(items) for part in dicts(item.get("content")))]
    return [part for part in dicts(parts) if "logprobs" in part]


def _item(choice: Choice, item: Json) -> None:
    kind = item.get("type")
    if kind == "message":
        for part in dicts(item.get("content")):
            text = string(part.get("text")) or string(part.get("refusal"))
            if text:
                choice.text.append(text)
    elif kind == "function_call":
        call = ToolCall(item.get("call_id"), [string(item.get("name")) or ""], [string(item.get("arguments")) or ""])
        choice.tool_calls[len(choice.tool_calls)] = call
    elif kind == "reasoning":
        parts = dicts(item.get("summary")) + dicts(item.get("content"))
        choice.reasoning += [text for part in parts if (text := string(part.get("text")))]


def _request_messages(body: Mapping[str, Any]) -> list[Json]:
    instructions, given = body.get("instructions"), body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else dicts(given)
    return [{"role": "system", "content": instructions}, *items] if isinstance(instructions, str) else items


def _message(item: Json) -> Json:
    kind = item.get("type")
    if kind == "function_call":
        return {"role": "assistant", "parts": [tool_call_part(item.get("call_id"), item.get("name"), item.get("arguments"))]}
    if kind == "function_call_output":
        return {"role": "tool", "parts": [tool_response_part(item.get("call_id"), item.get("output"))]}
    if "role" in item:
        return {"role": item["role"], "parts": content_parts(item.get("content"))}
    return {"role": "assistant", "parts": [item]}


_FIELDS: Final = frozenset(
    {
        *("access_programs", "background", "context_management", "conversation", "image", "include", "input", "instructions"),
        *("max_output_tokens", "max_tool_calls", "model", "moderation", "parallel_tool_calls", "previous_response_id", "prompt"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store"),
        *("stream", "stream_options", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
    }
)
RESPONSES: Final = Dialect(
    "responses",
    "chat",
    _FIELDS | SAMPLING,
    {TOKEN_IDS: True},
    take,
    _request_messages,
    _message,
    engine_extras={RAW_MESSAGES: True, INCLUDE: [_LOGPROBS]},
    smallest_request={"input": "Hi", "max_output_tokens": 16},  # OpenAI takes no fewer
    sampling={
        "temperature": "temperature",
        "top_p": "top_p",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    },
    via_chat=True,
)
