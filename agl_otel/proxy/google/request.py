"""Translate a request of generateContent to one of chat/completions. Pure.

Names may be written in camelCase or snake_case, as Google's API takes them. Fields that do not change what is sampled (safetySettings,
labels, thinkingConfig) are left out; what cannot be translated is refused.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agl_otel.errors import UsageError
from agl_otel.proxy.reply import Json, dicts

_SAMPLING: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "candidateCount": "n",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_CHOICE: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}
_UPPER: Final = re.compile(r"(?<=[a-z0-9])([A-Z])")


def chat_request(model: str, asked: Json, *, streamed: bool) -> Json:
    """Return the request of chat/completions. Raises UsageError."""
    if _get(asked, "cachedContent") is not None:
        raise UsageError("cachedContent is not available: send the whole conversation in contents")
    config = _object(_get(asked, "generationConfig"))
    held: Json = {"model": model, "messages": [*_system(_get(asked, "systemInstruction")), *_messages(asked.get("contents"))]}
    held |= {theirs: value for ours, theirs in _SAMPLING.items() if (value := _get(config, ours)) is not None}
    held |= _format(config)
    if tools := [_tool(each) for given in dicts(asked.get("tools")) for each in _declarations(given)]:
        held |= {"tools": tools, **_tool_choice(_object(_get(_object(_get(asked, "toolConfig")), "functionCallingConfig")))}
    return held | ({"stream": True, "stream_options": {"include_usage": True}} if streamed else {})


def _get(part: Mapping[str, Any], name: str) -> Any:
    found = part.get(name)
    return found if found is not None else part.get(_UPPER.sub(lambda letter: f"_{letter[1].lower()}", name))


def _object(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _parts(content: Any) -> list[Json]:
    """Return the parts of a content, which may also be a text, a part, or a list of parts."""
    if isinstance(content, str):
        return [{"text": content}]
    held = _object(content)
    parts: Any = content if isinstance(content, list) else held.get("parts", held if "text" in held else None)
    return [{"text": part} if isinstance(part, str) else part for part in _items(parts)]


def _items(value: Any) -> list[Any]:
    """Return the objects and texts in a list, or the value itself if it is one."""
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, (dict, str))]


def _system(instruction: Any) -> list[Json]:
    text = "\n".join(str(part.get("text")) for part in _parts(instruction) if part.get("text"))
    return [{"role": "system", "content": text}] if text else []


def _messages(contents: Any) -> list[Json]:
    if isinstance(contents, str):
        return [{"role": "user", "content": contents}]
    calls = _Calls()
    return [message for content in _items(contents) for message in _content(content, calls)]


@dataclass(slots=True)
class _Call:
    identity: str
    is_open: bool = True


class _Calls:
    """The ids of tool calls: those of the request, else made up. An answer without one is of the first open call of that name."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, deque[_Call]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[_Call]] = defaultdict(deque)
        self._count = 0

    def called(self, name: str, given: str | None) -> str:
        self._count += 1
        call = _Call(given or f"call_{self._count}")
        self._by_name[name].append(call)
        if given:
            self._by_id[given].append(call)
        return call.identity

    def answered(self, name: str, given: str | None) -> str:
        waiting = self._by_id[given] if given else self._by_name[name]
        while waiting:
            call = waiting.popleft()
            if call.is_open:
                call.is_open = False
                return call.identity
        raise UsageError(f"the functionResponse of {name[:100]!r} answers no functionCall before it, or one that is answered already")


def _id(given: Json) -> str | None:
    identity = given.get("id")
    if identity is not None and not isinstance(identity, str):
        raise UsageError("the id of a functionCall, and of a functionResponse, must be a text")
    return identity


def _content(content: Any, calls: _Calls) -> Iterator[Json]:
    """Yield the messages of a content: answers of tools first, as chat/completions wants them right after their calls."""
    role = _object(content).get("role") or "user"
    if role not in ("user", "model", "function"):
        raise UsageError(f"the role of a content is 'user' or 'model', not {role!r:.100}")
    parts = _parts(content)
    if role == "model":
        yield _said(parts, calls)
        return
    rest: list[Json] = []
    for part in parts:
        if (answer := _get(part, "functionResponse")) is not None:
            given = _object(answer)
            name = str(given.get("name") or "")
            yield {"role": "tool", "tool_call_id": calls.answered(name, _id(given)), "content": _output(given.get("response"))}
        else:
            rest.append(_asked(part))
    if rest:
        texts = [part["text"] for part in rest if part["type"] == "text"]
        yield {"role": "user", "content": "\n".join(texts) if len(texts) == len(rest) else rest}


def _said(parts: list[Json], calls: _Calls) -> Json:
    texts = {
        thought: "".join(str(p["text"]) for p in parts if p.get("text") and bool(p.get("thought")) is thought) for thought in (False, True)
    }
    made: list[Json] = []
    for part in parts:
        if (call := _get(part, "functionCall")) is not None:
            given = _object(call)
            name = str(given.get("name") or "")
            function = {"name": name, "arguments": json.dumps(given.get("args") or {}, ensure_ascii=False)}
            made.append({"id": calls.called(name, _id(given)), "type": "function", "function": function})
    more = ({"reasoning_content": texts[True]} if texts[True] else {}) | ({"tool_calls": made} if made else {})
    return {"role": "assistant", "content": texts[False] or None if made else texts[False], **more}


def _asked(part: Json) -> Json:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    inline, file = _object(_get(part, "inlineData")), _object(_get(part, "fileData"))
    kind = str(_get(inline or file, "mimeType") or "")
    if (inline or file) and kind.startswith("image/"):
        url = f"data:{kind};base64,{inline.get('data', '')}" if inline else str(_get(file, "fileUri"))
        return {"type": "image_url", "image_url": {"url": url}}
    raise UsageError(f"a part of contents is a text, an image, a functionCall or a functionResponse, not {kind or ', '.join(part)[:100]!r}")


def _output(response: Any) -> str:
    """Return what a tool answered, as text; of {"output": text} and {"result": text} the text."""
    held = _object(response)
    only = next(iter(held.values()), None) if held.keys() in ({"output"}, {"result"}) else None
    return only if isinstance(only, str) else json.dumps(response if response is not None else {}, ensure_ascii=False)


def _declarations(tool: Json) -> list[Json]:
    found = _get(tool, "functionDeclarations")
    if found is None and (others := [name for name, value in tool.items() if value is not None]):
        raise UsageError(f"the tool {others[0][:100]!r} is Google's own, which no model server has: send functionDeclarations only")
    return dicts(found)


def _tool(declaration: Json) -> Json:
    schema = _get(declaration, "parametersJsonSchema")
    if schema is None and (given := declaration.get("parameters")) is not None:
        schema = _in_lower_case(given)
    function = {name: declaration[name] for name in ("name", "description") if declaration.get(name) is not None}
    return {"type": "function", "function": function | ({"parameters": schema} if schema is not None else {})}


def _in_lower_case(schema: Any) -> Any:
    """Return a schema of Google's as JSON Schema, whose types are in lower case."""
    if isinstance(schema, list):
        return [_in_lower_case(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    held = {name: _in_lower_case(value) for name, value in cast("Json", schema).items()}
    return held | ({"type": held["type"].lower()} if isinstance(held.get("type"), str) else {})


def _tool_choice(config: Json) -> Json:
    mode, allowed = config.get("mode"), _get(config, "allowedFunctionNames")
    if mode is None:
        return {}
    if mode not in _CHOICE:
        raise UsageError(f"the mode of functionCallingConfig is one of {', '.join(_CHOICE)}, not {mode!r:.100}")
    if mode == "ANY" and isinstance(allowed, list) and len(cast("list[Any]", allowed)) == 1:
        return {"tool_choice": {"type": "function", "function": {"name": allowed[0]}}}
    return {"tool_choice": _CHOICE[mode]}


def _format(config: Json) -> Json:
    if _get(config, "responseMimeType") != "application/json":
        return {}
    schema = _get(config, "responseJsonSchema")
    if schema is None:
        schema = _in_lower_case(_get(config, "responseSchema"))
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
