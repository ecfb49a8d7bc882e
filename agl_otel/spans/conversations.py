"""Read model calls and their messages from spans, in every dialect: the one reader for adapters, the CLI, the web and masking. Pure.

`read_call` reads a span as a model call; `ModelCall.conversation` has its messages in OpenAI's form, for training, and `written` has them
as they were written, for display. calls.py joins the spans of one call, history.py expands stored prefixes, and docs/dialects.md shows how
to add a dialect.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agl_otel.errors import SpanShapeError
from agl_otel.spans.dialects import DIALECTS, openllmetry
from agl_otel.spans.dialects.dialect import Conversation, Dialect, Message, as_text, checked, first, numbers
from agl_otel.spans.dialects.shapes import from_parts
from agl_otel.spans.tolerant import MALFORMED, json_of, number_of
from agl_otel.types import SpanLike

NO_MESSAGES: Final = Conversation([], [], None)
ANYTHING: Final = openllmetry.DIALECT
"""The dialect for spans that match none, but that a pattern of the user's marks as model calls."""
_CUT_CONTENT: Final = re.compile(r'"content": ?"([^"\\]*+(?:\\.[^"\\]*+)*+)')  # possessive: saves 120 bytes for each character
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The model call in a span; its messages are read on access."""

    span: SpanLike
    dialect: Dialect
    model: str
    response_id: str
    """Empty if the span has none."""
    prompt_token_ids: list[int]
    """As stored; [] without any."""
    response_token_ids: list[int]
    logprobs: list[float] | None
    """One for each response token; None without any."""

    @property
    def conversation(self) -> Conversation:
        """Prompt, reply and tools. Raises SpanShapeError that names a span without the shape of its dialect."""
        try:
            return checked(self.dialect.read(self.span))
        except MALFORMED as error:
            ids = f"{getattr(self.span, 'span_id', '?')} ({self.span.name}) of rollout {getattr(self.span, 'rollout_id', '?')}"
            why = f"{type(error).__name__}: {error!s:.200}"
            raise SpanShapeError(f"span {ids} holds no readable messages ({self.dialect.name}): {why}") from error

    @property
    def readable(self) -> Conversation:
        """`conversation`; empty, with a warning, if it cannot be read."""
        try:
            return self.conversation
        except SpanShapeError as error:
            _log.warning("the messages of a model call are left out: %s", error)
            return NO_MESSAGES

    @property
    def usage(self) -> tuple[int | None, int | None]:
        """(input, output) tokens as counted by the provider."""
        attributes = self.span.attributes or {}
        counts = (first(attributes, self.dialect.input_tokens), first(attributes, self.dialect.output_tokens))
        return (_count(counts[0]), _count(counts[1]))


def dialect_of(span: SpanLike) -> Dialect | None:
    """Return the dialect in which `span` is a model call; None if it is not one."""
    attributes: Mapping[str, Any] = span.attributes or {}
    return next((dialect for dialect in DIALECTS if dialect.matches(span.name, attributes)), None)


def read_call(span: SpanLike, *, anyway: bool = False) -> ModelCall | None:
    """Read `span` as a model call; None if it is not one, unless `anyway` is set (then whatever is readable is read)."""
    dialect = dialect_of(span) or (ANYTHING if anyway else None)
    if dialect is None:
        return None
    attributes = span.attributes or {}
    logprobs = numbers(first(attributes, dialect.logprobs))
    return ModelCall(
        span=span,
        dialect=dialect,
        model=str(first(attributes, dialect.model) or ""),
        response_id=str(first(attributes, dialect.response_id) or ""),
        prompt_token_ids=numbers(first(attributes, dialect.prompt_token_ids)),
        response_token_ids=numbers(first(attributes, dialect.response_token_ids)),
        logprobs=logprobs or None,
    )


def written(span: SpanLike) -> Conversation:
    """Return the messages of a span for display: unchecked, with `parts` that OpenAI's form lacks; none if they cannot be read.

    Unlike `read_call` it also reads agent spans with OpenTelemetry's message attributes.
    """
    dialect = dialect_of(span)
    try:
        return from_parts(span) if dialect is None else dialect.read(span)
    except MALFORMED:
        return NO_MESSAGES


def text_of(message: Message) -> str:
    """Return the text of a message of `written`, a line for each part: a tool call as NAME(ARGUMENTS), an image or the like as JSON."""
    parts = message.get("parts")
    if isinstance(parts, list):
        lines = [_part_text(part) for part in cast("list[Any]", parts)]
    else:
        lines = [_content_text(message.get("content"))]
        calls = message.get("tool_calls") or ()
        lines += [f"{function.get('name')}({_text(function.get('arguments'))})" for function in (call["function"] for call in calls)]
    return "\n".join(line for line in lines if line)


def text_of_cut(messages: str) -> str:
    """Extract the texts from possibly truncated JSON of OpenTelemetry's messages; return the JSON if it has none (a tool call)."""
    texts = [_unquoted(found) for found in _CUT_CONTENT.findall(messages)]
    return " ".join(text for text in texts if text) or messages


def _unquoted(text: str) -> str:
    try:
        return str(json_of(f'"{text}"'))
    except ValueError:  # truncated within an escape
        return text


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "\n".join(text for text in map(_part_text, parts) if text)
    return _text(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return _text(part)
    held = cast("Mapping[str, Any]", part)
    match held.get("type"):
        case "tool_call":
            return f"{held.get('name')}({_text(held.get('arguments'))})"
        case "tool_call_response":
            return _text(held.get("response", held.get("result")))
        case "text" | "reasoning":
            return _text(held.get("content", held.get("text")))
        case _:
            return _text(held)


def _text(value: Any) -> str:
    return "" if value is None else as_text(value)


def _count(value: Any) -> int | None:
    number = number_of(value)  # a text, where a collector stores no types
    return int(number) if number is not None and math.isfinite(number) else None
