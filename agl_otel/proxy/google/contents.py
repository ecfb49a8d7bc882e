"""Translate the contents of a request of generateContent to messages of chat/completions. Pure."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from agl_otel.errors import UsageError
from agl_otel.proxy.google.fields import fields, instance
from agl_otel.proxy.reply import Json, object_of

_DATA: Final = frozenset({"text", "inlineData", "fileData", "functionCall", "functionResponse"})
_PART: Final = _DATA | {"thought", "thoughtSignature"}


def system(instruction: Any) -> list[Json]:
    """Return the system message, if there is an instruction. Raises UsageError."""
    if instruction is None:
        return []
    parts = _opened(instruction, "systemInstruction")[1]
    if others := {name for part in parts for name in part.keys() & _DATA if name != "text"}:
        raise UsageError(f"systemInstruction has {min(others)!r}: chat/completions takes texts in it only")
    text = "\n".join(part["text"] for part in parts if part["text"])
    return [{"role": "system", "content": text}] if text else []


def messages(contents: Any) -> list[Json]:
    """Return the messages of contents: a list, or the only one. Raises UsageError."""
    items: Any = [contents] if isinstance(contents, (dict, str)) else contents
    if not isinstance(items, list) or not items:
        raise UsageError("contents must be a list of at least one content")
    calls = _Calls()
    return [message for content in cast("list[Any]", items) for message in _content(content, calls)]


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


def _opened(content: Any, where: str) -> tuple[Any, list[Json]]:
    """Return role and parts of a content, which may also be a text, a part, or a list of parts; parts without data are left out."""
    if isinstance(content, (str, list)) or (isinstance(content, dict) and "text" in content):
        role, parts = None, cast("Any", content)
    else:
        held = fields(content, where, {"role", "parts"})
        role, parts = held.get("role"), held.get("parts", [])
    found = [_part(each, where) for each in ([parts] if isinstance(parts, (dict, str)) else instance(parts, list, f"the parts of {where}"))]
    return role, [part for part in found if part.keys() & _DATA]


def _part(part: Any, where: str) -> Json:
    held = {"text": part} if isinstance(part, str) else fields(part, f"a part of {where}", _PART)
    data = sorted(held.keys() & _DATA)
    if len(data) > 1:
        raise UsageError(f"a part of {where} has {' and '.join(data)}: send each in a part of its own")
    if not isinstance(held.get("text", ""), str) or not isinstance(held.get("thought", False), bool):
        raise UsageError(f"the text of a part of {where} must be a text, and thought true or false")
    return held


def _content(content: Any, calls: _Calls) -> Iterator[Json]:
    """Yield the messages of a content: answers of tools first, as chat/completions wants them right after their calls."""
    role, parts = _opened(content, "contents")
    if role not in (None, "", "user", "model", "function"):
        raise UsageError(f"the role of a content is 'user' or 'model', not {role!r:.100}")
    if role == "model":
        yield _said(parts, calls)
        return
    rest: list[Json] = []
    for part in parts:
        if "functionResponse" in part:
            given = fields(part["functionResponse"], "a functionResponse", {"id", "name", "response"})
            yield {"role": "tool", "tool_call_id": calls.answered(*_named(given)), "content": _output(given.get("response"))}
        else:
            rest.append(_asked(part))
    if rest:
        texts = [part["text"] for part in rest if part["type"] == "text"]
        yield {"role": "user", "content": "\n".join(texts) if len(texts) == len(rest) else rest}


def _named(given: Json) -> tuple[str, str | None]:
    """Return name and id of a function's call or response."""
    name, identity = instance(given.get("name"), str, "the name of a functionCall or functionResponse"), given.get("id") or None
    return name, None if identity is None else instance(identity, str, "the id of a functionCall or functionResponse")


def _said(parts: list[Json], calls: _Calls) -> Json:
    texts: dict[bool, list[str]] = {False: [], True: []}
    made: list[Json] = []
    for part in parts:
        if "functionCall" in part:
            given = fields(part["functionCall"], "a functionCall", {"id", "name", "args"})
            name, identity = _named(given)
            arguments = json.dumps(instance(given.get("args", {}), dict, "the args of a functionCall"), ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            made.append({"id": calls.called(name, identity), "type": "function", "function": function})
        elif "text" in part:
            texts[part.get("thought", False)].append(part["text"])
        else:
            raise UsageError(f"a part of the model's is a text or a functionCall, not {min(part.keys() & _DATA)!r}")
    text, thought = ("".join(texts[kind]) for kind in (False, True))
    more = ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": made} if made else {})
    return {"role": "assistant", "content": text or None if made else text, **more}


def _asked(part: Json) -> Json:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    if "functionCall" in part:
        raise UsageError("a part of the user's is a text, an image or a functionResponse, not 'functionCall'")
    name, place = ("inlineData", "data") if "inlineData" in part else ("fileData", "fileUri")
    given = fields(part[name], name, {"mimeType", "displayName", place})
    kind, value = instance(given.get("mimeType"), str, f"the mimeType of {name}"), given.get(place)
    if not kind.startswith("image/"):
        raise UsageError(f"a part of contents is a text, an image, a functionCall or a functionResponse, not {kind[:100]!r}")
    url = instance(value, str, f"the {place} of {name}")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{url}" if name == "inlineData" else url}}


def _output(response: Any) -> str:
    """Return what a tool answered, as text; of {"output": text} and {"result": text} the text."""
    held = object_of(response)
    only = next(iter(held.values()), None) if held.keys() in ({"output"}, {"result"}) else None
    return only if isinstance(only, str) else json.dumps(response if response is not None else {}, ensure_ascii=False)
