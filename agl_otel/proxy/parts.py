"""Build OpenTelemetry's `gen_ai.input.messages` and `.output.messages` (JSON) from the parts that all dialects share. Pure.

Text is untrusted: its size is limited (that of token ids is not), and invalid Unicode is replaced, because protobuf rejects it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from agl_otel.proxy.reply import Choice, Json, dense, dicts
from agl_otel.spans.tolerant import json_of

MAX_TEXT: Final = 1 << 20
"""Characters of one attribute. A span must fit into one OTLP request, and 1 MB of text is more than anyone reads."""


def output_message(choice: Choice) -> str:
    """Encode one choice as an output message."""
    parts: list[Json] = []
    if reasoning := "".join(choice.reasoning):
        parts.append({"type": "reasoning", "content": reasoning})
    if text := "".join(choice.text):
        parts.append(text_part(text))
    for call in choice.tool_calls.values():
        arguments = "".join(call.arguments) if call.given is None else call.given
        parts.append(tool_call_part(call.id, "".join(call.name), arguments))
    return dump([{"role": "assistant", "parts": parts, "finish_reason": choice.finish_reason or ""}])


def content_parts(content: Any) -> list[Json]:
    """Convert an OpenAI-like `content`, a string or a list of typed parts, to parts."""
    if isinstance(content, list):
        return [_part(item) for item in cast("list[Any]", content)]
    return [text_part(content)] if content else []


def chat_message(message: Json) -> Json:
    """Convert a message of chat/completions."""
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        return {"role": role, "parts": [tool_response_part(message.get("tool_call_id"), content)]}
    parts = content_parts(content)
    for call in dicts(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict):
            named = cast("Json", function)
            parts.append(tool_call_part(call.get("id"), named.get("name"), named.get("arguments")))
    return {"role": role, "parts": parts}


def text_part(content: Any) -> Json:
    """Build a text part."""
    return {"type": "text", "content": content}


def tool_call_part(call_id: Any, name: Any, arguments: Any) -> Json:
    """Build the part of a tool call."""
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments_value(arguments)}


def arguments_value(arguments: Any) -> Any:
    """Return a tool call's arguments as the value that their JSON text spells; text that is no JSON as it is."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            return json_of(arguments)
    return arguments


def tool_response_part(call_id: Any, response: Any) -> Json:
    """Build the part of a tool's response."""
    return {"type": "tool_call_response", "id": call_id, "response": response}


def tool_definitions(body: Mapping[str, Any]) -> str | None:
    """Encode the definitions of a request's functions in OpenAI's form; None without any, or beyond MAX_TEXT.

    Tools that the provider runs (web search) have no definition.
    """
    found: list[Json] = []
    for tool in dicts(body.get("tools")):
        function: Any = tool.get("function", {key: value for key, value in tool.items() if key != "type"})
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        named = cast("Json", function)
        if "function" in tool:
            found.append(tool)
        elif "input_schema" in named:
            given = {key: value for key, value in named.items() if key not in ("input_schema", "cache_control")}
            found.append({"type": "function", "function": {**given, "parameters": named["input_schema"]}})
        elif tool.get("type") == "function":
            found.append({"type": "function", "function": named})
    text = clean(dense(found)) if found else None
    return text if text is not None and len(text) <= MAX_TEXT else None


def dump(messages: Iterable[Json]) -> str:
    """Encode messages as the attribute's value; if too long, a note replaces the oldest."""
    return dump_checked(messages)[0]


def dump_checked(messages: Iterable[Json]) -> tuple[str, bool]:
    """Return the value of `dump`, and whether it holds all messages."""
    texts = [dense(message) for message in messages]
    short = sum(map(len, texts)) > MAX_TEXT
    return clean(f"[{','.join(_shortened(texts) if short else texts)}]"), not short


def clean(text: str) -> str:
    """Replace unpaired surrogates in `text`, which JSON can encode but UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _shortened(texts: list[str]) -> list[str]:
    kept: list[str] = []
    room = MAX_TEXT
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    left_out = f"{len(texts) - len(kept)} messages of {sum(map(len, texts)) - sum(map(len, kept))} characters are left out"
    return [json.dumps({"role": "system", "parts": [text_part(left_out)]}), *reversed(kept)]


def _part(item: Any) -> Json:
    if not isinstance(item, dict):
        return text_part(item)
    part = cast("Json", item)
    return text_part(part.get("text")) if part.get("type") in ("text", "input_text", "output_text") else part
