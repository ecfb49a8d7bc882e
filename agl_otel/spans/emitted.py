"""Read emitted spans: rewards (agl_otel.spans.rewards), messages, objects. Pure.

Each function takes a stored span, a span of the OpenTelemetry SDK, the result of an emitter, or a mapping of attributes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

from agl_otel.spans.rewards import (
    Readable,
    attributes_of,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from agl_otel.spans.tolerant import MALFORMED, json_of
from agl_otel_hook import conventions

__all__ = [
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
]
_LITERALS: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "bytes": base64.b64decode,
}


def get_message_value(span: Readable) -> str | None:
    """Return the text of a message span; None without one. Raises TypeError if it is not a string."""
    body = attributes_of(span).get(conventions.MESSAGE_BODY)
    if body is not None and not isinstance(body, str):
        raise TypeError(f"the body of a message is a {type(body).__name__}, not text")
    return body


def get_object_value(span: Readable) -> Any:
    """Return the object of an object span; None without one. Raises RuntimeError if it cannot be read."""
    attributes = attributes_of(span)
    if (text := attributes.get(conventions.OBJECT_JSON)) is not None:
        try:
            return json_of(text)
        except MALFORMED as error:
            raise RuntimeError(f"the object of the span is no JSON: {error}") from error
    if (literal := attributes.get(conventions.OBJECT_LITERAL)) is None:
        return None
    kind = str(attributes.get(conventions.OBJECT_TYPE, "str"))
    if kind not in _LITERALS:
        raise RuntimeError(f"an object of type {kind!r} has no literal: known are {', '.join(_LITERALS)}")
    try:
        return _LITERALS[kind](literal)
    except MALFORMED as error:
        raise RuntimeError(f"the object of the span is no {kind}: {error}") from error
