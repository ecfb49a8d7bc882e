"""OpenAI messages as OpenTelemetry's `gen_ai.input.messages` and `.output.messages` (JSON), which viewers show. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, cast

from agl_otel.proxy.reply import Choice

Json = dict[str, Any]


def input_messages(body: Mapping[str, Any]) -> str:
    """The request's conversation, or its plain prompt as one user message."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt = body.get("prompt")
        return _dump([{"role": "user", "parts": [_text(prompt if isinstance(prompt, str) else _dump(prompt))]}])
    return _dump([_message(cast("Json", item)) for item in cast("list[Any]", messages) if isinstance(item, dict)])


def output_message(choice: Choice) -> str:
    """One reply."""
    parts: list[Json] = []
    if reasoning := "".join(choice.reasoning):
        parts.append({"type": "reasoning", "content": reasoning})
    if text := "".join(choice.text):
        parts.append(_text(text))
    parts += [_tool_call(call["id"], call["name"], call["arguments"]) for call in choice.tool_calls.values()]
    return _dump([{"role": "assistant", "parts": parts, "finish_reason": choice.finish_reason or ""}])


def _message(message: Json) -> Json:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        return {"role": role, "parts": [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]}
    parts = [_part(item) for item in cast("list[Any]", content)] if isinstance(content, list) else [_text(content)] if content else []
    calls = message.get("tool_calls")
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        function = cast("Json", call).get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            named = cast("Json", function)
            parts.append(_tool_call(cast("Json", call).get("id"), named.get("name"), named.get("arguments")))
    return {"role": role, "parts": parts}


def _part(item: Any) -> Json:
    if not isinstance(item, dict):
        return _text(item)
    part = cast("Json", item)
    return _text(part.get("text")) if part.get("type") == "text" else part


def _text(content: Any) -> Json:
    return {"type": "text", "content": content}


def _tool_call(call_id: Any, name: Any, arguments: Any) -> Json:
    with contextlib.suppress(TypeError, ValueError):  # a model may write what is no JSON: shown as it is
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
