"""The shared types: Message, Conversation, Content, and Dialect, which describes how one instrumentation writes a model call. Pure.

A dialect names attributes; shapes.py reads conversations from them, with one reader for each shape. A value is looked up by a path: an
attribute key and, if that attribute is JSON, the steps into it.
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
"""An attribute key, then steps into its value."""
ANY: Final = ("any",)
"""As the allowed values of a key: the key is present."""
ABSENT: Final = None
"""Among the allowed values of a key: the key is absent."""
SPAN_NAME: Final = "span.name"
"""The key of the span's name in a condition."""


class Conversation(NamedTuple):
    """Prompt and replies of one model call."""

    prompt: list[Message]
    reply: list[Message]
    """One for each choice."""
    tools: list[Message] | None


def checked(conversation: Conversation) -> Conversation:
    """Return the conversation in OpenAI's form: roles and contents are strings, parts and tool calls are objects.

    Raises ValueError, TypeError or LookupError if it cannot be converted.
    """
    prompt, reply, tools = conversation
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
    """Return text unchanged, other values as JSON with bytes in base64. Raises ValueError or RecursionError if nested too deep."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_base64)


def text_or_none(value: Any) -> str | None:
    """`as_text`, but None stays None."""
    return None if value is None else as_text(value)


def _base64(value: Any) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"a value of type {type(value).__name__} has no JSON")
    return base64.b64encode(value).decode()


Shape = Literal["messages", "numbered", "parts", "list", "body", "logprobs", "text"]
"""How an attribute stores content. `messages`: a JSON list of messages; `numbered`: flat keys KEY{i}.field. The others cannot be split
into messages: `parts` of one message, a `list` or a `body` in JSON, tokens with `logprobs`, any `text`."""


class Content(NamedTuple):
    """An attribute (or all that begin with its key) with content: text of users, models and tools."""

    key: str
    """A key that ends in a dot is a prefix."""
    shape: Shape = "text"
    role: str = ""
    """The author's role; empty if the messages name it, or if it is unknown."""
    reply: bool = False
    """Whether the model wrote it in this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one instrumentation writes a model call. Of several paths the first that has a value is used."""

    name: str
    written_by: str
    """For display: the libraries that write it."""
    call: tuple[Mapping[str, Collection[str | None]], ...]
    """A span is a model call in this dialect if one of these matches in all its entries {key: allowed values}. A key that ends in a dot
    is a prefix."""
    read: Callable[[SpanLike], Conversation]
    """Reads the conversation. Raises an error of tolerant.MALFORMED if the attributes have another shape."""
    model: tuple[Path, ...] = (("gen_ai.response.model",), ("gen_ai.request.model",))
    response_id: tuple[Path, ...] = (("gen_ai.response.id",),)
    input_tokens: tuple[Path, ...] = (("gen_ai.usage.input_tokens",), ("gen_ai.usage.prompt_tokens",))
    output_tokens: tuple[Path, ...] = (("gen_ai.usage.output_tokens",), ("gen_ai.usage.completion_tokens",))
    prompt_token_ids: tuple[Path, ...] = (("prompt_token_ids",),)
    response_token_ids: tuple[Path, ...] = (("response_token_ids",),)
    logprobs: tuple[Path, ...] = (("logprobs.content",),)
    """A list of numbers, or of OpenAI's `{"token": …, "logprob": …}`."""
    request: tuple[str, ...] = field(default=("gen_ai.request",))
    """Key prefixes of the request's settings."""
    response: tuple[str, ...] = field(default=("gen_ai.response",))
    """Key prefixes of other fields of the response."""
    content: tuple[Content, ...] = ()
    """The attributes to mask, on any span of the library; more than `read` reads."""

    def matches(self, name: str, attributes: Attributes) -> bool:
        """Whether a span of that name and attributes is a model call in this dialect."""
        return any(all(_allowed(name, attributes, key, values) for key, values in condition.items()) for condition in self.call)


def _allowed(name: str, attributes: Attributes, key: str, values: Collection[str | None]) -> bool:
    if key.endswith("."):
        return any(each.startswith(key) for each in attributes)
    value = name if key == SPAN_NAME else attributes.get(key)
    return value is not None if values is ANY else value in values


def first(attributes: Attributes, paths: Sequence[Path]) -> Any:
    """Return the value at the first path that has one; None if none has."""
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
    """Parse JSON or a Python repr (litellm writes it); return the text if it is neither, or exceeds the limits of tolerant.py."""
    for parse in (json_of, _of_repr):
        try:
            return parse(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


_MAX_REPR: Final = 100_000  # values in one text: Python's parser takes some 400 bytes each


def _of_repr(text: str) -> Any:
    if text.count(",") > _MAX_REPR:
        raise ValueError(f"more than {_MAX_REPR} values")
    return json_of(json.dumps(ast.literal_eval(text)))


def numbers(value: Any) -> list[Any]:
    """Return a list of token ids or log-probs, in any of their forms; [] if there is none, or if an item is not a number."""
    value = loads(value) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        return []
    items = cast("Sequence[Any]", value)
    if items and isinstance(items[0], (list, tuple)):  # one list for each choice
        items = cast("Sequence[Any]", items[0])
    read = [item.get("logprob") if isinstance(item, Mapping) else item for item in items]
    return read if all(isinstance(item, (int, float)) or item is None for item in read) else []
