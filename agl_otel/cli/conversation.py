"""What was said in a model call, whole: the proxy stores of a call what is new and names the earlier call that has the rest. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agl_otel import semconv
from agl_otel.types import Span

PROMPT_TOKENS: Final = "prompt tokens"
"""View-only attribute of a call: how many tokens its whole prompt has."""
_Call = tuple[str, str, str, int, int]
"""(rollout, attempt, process marker, call, choice)."""


def with_prompt_tokens(spans: Sequence[Span]) -> list[Span]:
    """The spans, those of calls with the length of their whole prompt; without it where the call that they go on from is not there."""
    ends: dict[_Call, int] = {}
    lengths: dict[int, int] = {}
    calls = [span for span in spans if semconv.LLM_CALL in span.attributes or semconv.LLM_PROMPT_TOKEN_IDS in span.attributes]
    for span in sorted(calls, key=lambda span: _place(span, semconv.LLM_CALL, semconv.LLM_CHOICE)):
        before = 0
        if span.attributes.get(semconv.LLM_PREFIX_CALL):
            before = ends.get(_place(span, semconv.LLM_PREFIX_CALL, semconv.LLM_PREFIX_CHOICE), -1)
        prompt, reply = (span.attributes.get(name) for name in (semconv.LLM_PROMPT_TOKEN_IDS, semconv.LLM_RESPONSE_TOKEN_IDS))
        if before >= 0 and prompt is not None:
            lengths[id(span)] = before + len(prompt)
            ends[_place(span, semconv.LLM_CALL, semconv.LLM_CHOICE)] = lengths[id(span)] + len(reply or ())
    return [_with(span, lengths[id(span)]) if id(span) in lengths else span for span in spans]


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
        held: Any = json.loads(value) if isinstance(value, str) else value
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


def _place(span: Span, call: str, choice: str) -> _Call:
    held = span.attributes
    marker = str(held.get(semconv.PROCESS, ""))
    return span.rollout_id, span.attempt_id, marker, int(held.get(call, 0)), int(held.get(choice, 0))


def _with(span: Span, prompt_tokens: int) -> Span:
    return span.model_copy(update={"attributes": {**span.attributes, PROMPT_TOKENS: prompt_tokens}})
