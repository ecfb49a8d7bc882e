"""The types of the boundary: Message, Conversation, Content, and Dialect, which describes how one instrumentation writes a model call.

A dialect names attributes; how conversations are read from them stands in shapes.py, once for each shape. A value is looked up by a path:
an attribute key, and, where that attribute holds JSON, the steps into it. Pure.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast

from agl_otel.spans.tolerant import json_of
from agl_otel.types import SpanLike

Message = dict[str, Any]
"""One chat message, in OpenAI's form."""
Attributes = Mapping[str, Any]
Path = tuple[str | int, ...]
"""An attribute key, then steps into what it holds."""
ANY: Final = ("any",)
"""As the allowed values of a key: the key is there."""
ABSENT: Final = None
"""Among the allowed values of a key: the key is not there."""
SPAN_NAME: Final = "span.name"
"""Stands for the span's name in a condition."""


class Conversation(NamedTuple):
    """What one model call was asked and what it answered."""

    prompt: list[Message]
    reply: list[Message]
    """One for each choice."""
    tools: list[Message] | None


def checked(said: Conversation) -> Conversation:
    """The conversation as OpenAI has it: who speaks and what are texts, parts and tool calls are objects.

    Raises ValueError, TypeError or LookupError where it cannot be made so.
    """
    prompt, reply, tools = said
    for tool in tools or ():
        if not isinstance(tool.get("function"), Mapping):
            raise ValueError("a tool's definition is no object with a function")
    return Conversation([_checked_message(each) for each in prompt], [_checked_message(each) for each in reply], tools)


def _checked_message(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(message["role"], str):
        raise TypeError("a message's role is no text")
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in cast("list[Any]", content)):
        content = [_checked_part(part) for part in cast("list[Message]", content)]
    else:
        content = text_or_none(content)
    made = {**message, "content": content, **{key: text_or_none(message[key]) for key in ("name", "tool_call_id") if key in message}}
    made.pop("parts", None)
    return made


def _checked_part(part: Message) -> Message:
    if part.get("type") != "image_url":
        return part
    image = part["image_url"]
    url = image.get("url") if isinstance(image, Mapping) else image
    return {**part, "image_url": {**(image if isinstance(image, Mapping) else {}), "url": text_or_none(url)}}


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON; bytes are base64 there. Raises ValueError or RecursionError where it is nested too deep."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_base64)


def text_or_none(value: Any) -> str | None:
    """`as_text`, but nothing stays nothing."""
    return None if value is None else as_text(value)


def _base64(value: Any) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"a value of type {type(value).__name__} has no JSON")
    return base64.b64encode(value).decode()


Shape = Literal["messages", "numbered", "parts", "list", "body", "logprobs", "text"]
"""How an attribute holds content. `messages`: a JSON list of them; `numbered`: flat keys KEY{i}.field. The others cannot be split into
messages: `parts` of one message, a `list` or a `body` in JSON, tokens with `logprobs`, any `text`."""


class Content(NamedTuple):
    """An attribute, or all that begin with its key, that holds content: the text of people, models and tools."""

    key: str
    """With a dot at its end: every key that begins so."""
    shape: Shape = "text"
    role: str = ""
    """Of the author; empty where the messages name it themselves, or it cannot be known."""
    reply: bool = False
    """Whether the model wrote it in this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one instrumentation writes a model call. The first path of several that leads somewhere is taken."""

    name: str
    written_by: str
    """For people: which libraries write so."""
    call: tuple[Mapping[str, Collection[str | None]], ...]
    """A span is a model call in this dialect where one of these holds: {key: allowed values}, all of them. A key that ends in a dot
    stands for any key that begins so."""
    read: Callable[[SpanLike], Conversation]
    """Raises an error of tolerant.MALFORMED where the attributes have another shape."""
    model: tuple[Path, ...] = (("gen_ai.response.model",), ("gen_ai.request.model",))
    response_id: tuple[Path, ...] = (("gen_ai.response.id",),)
    input_tokens: tuple[Path, ...] = (("gen_ai.usage.input_tokens",), ("gen_ai.usage.prompt_tokens",))
    output_tokens: tuple[Path, ...] = (("gen_ai.usage.output_tokens",), ("gen_ai.usage.completion_tokens",))
    prompt_token_ids: tuple[Path, ...] = (("prompt_token_ids",),)
    response_token_ids: tuple[Path, ...] = (("response_token_ids",),)
    logprobs: tuple[Path, ...] = (("logprobs.content",),)
    """A list of numbers, or of OpenAI's `{"token": …, "logprob": …}`."""
    request: tuple[str, ...] = field(default=("gen_ai.request",))
    """Prefixes under which the settings of the request stand."""
    response: tuple[str, ...] = field(default=("gen_ai.response",))
    """Prefixes under which the other fields of the response stand."""
    content: tuple[Content, ...] = ()
    """The attributes that masking looks at, on any span of the library: wider than what `read` reads."""

    def matches(self, name: str, attributes: Attributes) -> bool:
        """Whether a span of that name and attributes is a model call in this dialect."""
        return any(all(_allowed(name, attributes, key, values) for key, values in condition.items()) for condition in self.call)


def _allowed(name: str, attributes: Attributes, key: str, values: Collection[str | None]) -> bool:
    if key.endswith("."):
        return any(each.startswith(key) for each in attributes)
    value = name if key == SPAN_NAME else attributes.get(key)
    return value is not None if values is ANY else value in values


def first(attributes: Attributes, paths: Sequence[Path]) -> Any:
    """What the first path that leads somewhere leads to; None where none does."""
    return next((found for path in paths if (found := _at(attributes, path)) is not None), None)


def _at(attributes: Attributes, path: Path) -> Any:
    value: Any = attributes.get(cast(str, path[0]))
    for step in path[1:]:
        value = loads(value) if isinstance(value, str) else value
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def loads(text: str) -> Any:
    """JSON, or what Python's repr wrote (litellm does); the text itself where it is neither, or more than tolerant.py reads."""
    for parse in (json_of, _of_repr):
        try:
            return parse(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


_MAX_REPR: Final = 100_000  # values in one text: Python's parser takes some 400 bytes for each


def _of_repr(text: str) -> Any:
    if text.count(",") > _MAX_REPR:
        raise ValueError(f"more than {_MAX_REPR} values")
    return json_of(json.dumps(ast.literal_eval(text)))


def numbers(value: Any) -> list[Any]:
    """A list of token ids or log-probs, however it was written; [] where there is none, or where an item is no number."""
    value = loads(value) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        return []
    items = cast("Sequence[Any]", value)
    if items and isinstance(items[0], (list, tuple)):  # one list for each choice
        items = cast("Sequence[Any]", items[0])
    read = [item.get("logprob") if isinstance(item, Mapping) else item for item in items]
    return read if all(isinstance(item, (int, float)) or item is None for item in read) else []
