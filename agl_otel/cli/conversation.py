"""What was said in a model call, whole: the proxy stores of a call what is new and names the earlier call that has the rest. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agl_otel.adapters.joined import SpanKey, prompts_in_full
from agl_otel.spans.tolerant import json_of
from agl_otel.types import Span
from agl_otel_hook import conventions

PROMPT_TOKENS: Final = "prompt tokens"
"""View-only attribute of a call: how many tokens its whole prompt has."""


def with_prompt_tokens(spans: Sequence[Span]) -> list[Span]:
    """The spans, those of calls with the length of their whole prompt; without it where the call that they go on from is not there."""
    whole = prompts_in_full(spans)
    return [_with_length(span, whole) for span in spans]


def _with_length(span: Span, whole: Mapping[SpanKey, Sequence[int]]) -> Span:
    own = span.attributes.get(conventions.LLM_PROMPT_TOKEN_IDS)
    prompt = whole.get((span.trace_id, span.span_id), own)
    if own is None or prompt is None or (span.attributes.get(conventions.LLM_PREFIX_CALL) and not prompt):
        return span
    return span.model_copy(update={"attributes": {**span.attributes, PROMPT_TOKENS: len(prompt)}})


def said(attributes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The messages of a call in their order, the replies last: (role, text)."""
    found: list[tuple[str, str]] = []
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for message in _messages(attributes.get(name)):
            parts = message.get("parts")
            texts = [_part(part) for part in cast("list[Any]", parts)] if isinstance(parts, list) else [_text(message.get("content"))]
            found.append((str(message.get("role") or "?"), "\n".join(text for text in texts if text)))
    return found


def _messages(value: object) -> list[dict[str, Any]]:
    try:
        held: Any = json_of(value) if isinstance(value, str) else value
    except ValueError:
        return []
    return [cast("dict[str, Any]", each) for each in cast("list[Any]", held) if isinstance(each, dict)] if isinstance(held, list) else []


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return _text(part)
    held = cast("dict[str, Any]", part)
    match held.get("type"):
        case "tool_call":
            return f"{held.get('name')}({_text(held.get('arguments'))})"
        case "tool_call_response":
            return _text(held.get("response", held.get("result")))
        case "text" | "reasoning":
            return _text(held.get("content"))
        case _:
            return _text(held)


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
