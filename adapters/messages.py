"""Spans in, chat messages out: one OpenAI-style conversation for each span of a model call. Pure; for prompts and for people.

Two ways of writing a call onto a span are read: JSON in `gen_ai.input.messages` and `.output.messages` (OpenTelemetry's conventions
from 1.37 on), and flat `gen_ai.prompt.{i}.*` and `gen_ai.completion.{i}.*` (OpenLLMetry, Agent Lightning 0.3). Token ids are not read
here: what is to be trained on token for token goes through trajectories.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agl_otel.errors import DataError
from agl_otel.types import Span

Message = dict[str, Any]
Attributes = Mapping[str, Any]


def to_messages(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """`{"messages": [...], "tools": [...] or None}` for every span that holds a model call, in the order of `spans`.

    Messages are OpenAI's: prompt first, then the reply; an assistant message with tool calls has content None. Tool calls of a
    reply that has none of its own come from the span's children with `tool.*` attributes. Raises DataError that names the span
    where its attributes do not have the shape that their convention says.
    """
    children: dict[str, list[Span]] = {}
    for span in spans:
        if span.parent_id and "tool.name" in span.attributes:
            children.setdefault(span.parent_id, []).append(span)
    samples: list[dict[str, Any]] = []
    for span in spans:
        dialect = next((read for prefixes, read in DIALECTS if any(key.startswith(prefixes) for key in span.attributes)), None)
        if dialect is None:
            continue
        try:
            prompt, reply, tools = dialect(span.attributes)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"span {span.span_id} ({span.name}) of rollout {span.rollout_id} holds no readable messages: {error}"
            ) from error
        calls = [_openai_call(*(child.attributes.get(key) for key in _CHILD_CALL)) for child in children.get(span.span_id, [])]
        if calls and not any(message.get("tool_calls") for message in reply):
            reply = [*reply[:-1], {**(reply[-1] if reply else {"role": "assistant"}), "content": None, "tool_calls": calls}]
        samples.append({"messages": [*prompt, *reply], "tools": tools})
    return samples


_CHILD_CALL: Final = ("tool.call.id", "tool.name", "tool.parameters")


def _openai_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


# --- OpenTelemetry's conventions: JSON ------------------------------------------------------------------------


def _from_json(attributes: Attributes) -> tuple[list[Message], list[Message], list[Any] | None]:
    instructions = _parsed(attributes, "gen_ai.system_instructions")
    prompt = [message for entry in _parsed(attributes, "gen_ai.input.messages") for message in _of_parts(entry)]
    if instructions:
        prompt.insert(0, {"role": "system", "content": _text(instructions)})
    reply = [message for entry in _parsed(attributes, "gen_ai.output.messages") for message in _of_parts(entry)]
    return prompt, reply, [_openai_tool(tool) for tool in _parsed(attributes, "gen_ai.tool.definitions")] or None


def _parsed(attributes: Attributes, key: str) -> list[Any]:
    value = attributes.get(key) or []
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{key} is not a list")
    return [json.loads(entry) if isinstance(entry, str) else entry for entry in value]


def _of_parts(entry: Mapping[str, Any]) -> list[Message]:
    """One entry is one message, but each tool's answer in it is a message of its own."""
    parts: list[Mapping[str, Any]] = entry.get("parts") or []
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(part.get("response", part.get("result")))}
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [_openai_call(part.get("id"), part.get("name"), part.get("arguments")) for part in parts if part.get("type") == "tool_call"]
    rest = [part for part in parts if part.get("type") not in ("tool_call", "tool_call_response", "reasoning")]
    if calls:
        return [{"role": entry["role"], "content": _text(rest) or None, "tool_calls": calls}, *answers]
    return answers if answers and not rest else [{"role": entry["role"], "content": _text(rest)}, *answers]


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(_as_text(part.get("content", "")) for part in parts)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return dict(tool)
    parameters = tool.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": json.loads(parameters) if isinstance(parameters, str) else parameters,
        },
    }


# --- OpenLLMetry: flat ----------------------------------------------------------------------------------------


def _from_flat(attributes: Attributes) -> tuple[list[Message], list[Message], list[Any] | None]:
    prompt = [_of_fields(entry) for entry in _list(attributes, "gen_ai.prompt")]
    reply = [_of_fields({"role": "assistant", **entry}) for entry in _list(attributes, "gen_ai.completion")]
    if any(message["role"] != "assistant" for message in reply):
        raise ValueError("a completion's role is not assistant")
    functions = _list(attributes, "gen_ai.request.functions") or _list(attributes, "llm.request.functions")
    return prompt, reply, [_openai_tool(function) for function in functions] or None


def _of_fields(entry: Mapping[str, Any]) -> Message:
    message: Message = {"role": entry["role"], "content": entry.get("content", "")}
    if "tool_call_id" in entry:
        message["tool_call_id"] = entry["tool_call_id"]
    if calls := entry.get("tool_calls"):
        message["content"] = None
        message["tool_calls"] = [_openai_call(call.get("id"), call.get("name"), call.get("arguments")) for call in calls]
    return message


def _list(attributes: Attributes, prefix: str) -> list[dict[str, Any]]:
    """The flat keys `prefix.{i}.field…` as a list of nested objects. Raises ValueError where they are not 0 … n - 1."""
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            *path, last = key[len(prefix) + 1 :].split(".")
            node = nested
            for step in path:
                node = node.setdefault(step, {})
            node[last] = value
    return [_lists_inside(entry) for entry in _as_list(nested, prefix)]


def _as_list(nested: Mapping[str, Any], name: str) -> list[Any]:
    if set(nested) != {str(place) for place in range(len(nested))}:
        raise ValueError(f"{name} is not a list: its keys are {sorted(nested)[:5]}")
    return [nested[str(place)] for place in range(len(nested))]


def _lists_inside(entry: dict[str, Any]) -> dict[str, Any]:
    calls = entry.get("tool_calls")
    return {**entry, "tool_calls": _as_list(calls, "tool_calls")} if isinstance(calls, dict) else entry


DIALECTS: Final[tuple[tuple[tuple[str, ...], Callable[[Attributes], tuple[list[Message], list[Message], list[Any] | None]]], ...]] = (
    (("gen_ai.input.messages", "gen_ai.output.messages"), _from_json),
    (("gen_ai.prompt.", "gen_ai.completion."), _from_flat),
)
"""Each: what a key of such a span starts with, and how its (prompt, reply, tools) are read. The first that fits is used."""
