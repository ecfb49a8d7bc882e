"""Conversations in full: our proxy stores of a call's messages only what is new, and names the earlier call that has the rest. Pure.

`agentlightning.llm.messages_call` names that call (of the same attempt and process), `.messages_before` says how many of its messages
come first; `gen_ai.input.messages` holds what follows them. The chain of calls goes back to one that holds all of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

from agl_otel import semconv
from agl_otel.types import Span

INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
Call = tuple[str, str, str, int]
"""(rollout, attempt, process marker, call)."""
AnySpan = TypeVar("AnySpan")


def in_full(spans: Sequence[AnySpan]) -> Sequence[AnySpan]:
    """The spans, those of calls that go on from another one with all their messages, as a list; all others as they are.

    A call whose history is not among the spans, or cannot be read, comes without messages: half a conversation would be taken for one.
    """
    told = [span for span in spans if isinstance(span, Span) and semconv.LLM_CALL in span.attributes]
    if not any(semconv.LLM_MESSAGES_CALL in span.attributes for span in told):
        return spans
    wholes: dict[Call, list[Any] | None] = {}
    full: dict[int, Span] = {}
    for span in sorted(told, key=lambda span: (_number(span, semconv.LLM_CALL), _number(span, semconv.LLM_CHOICE))):
        whole = _messages(span)
        if semconv.LLM_MESSAGES_CALL in span.attributes:
            earlier = wholes.get(_call(span, semconv.LLM_MESSAGES_CALL))
            count = _number(span, semconv.LLM_MESSAGES_BEFORE)
            whole = [*earlier[:count], *whole] if earlier is not None and whole is not None and len(earlier) >= count else None
            full[id(span)] = _with(span, whole)
        wholes.setdefault(_call(span, semconv.LLM_CALL), whole)  # the first choice's
    return [cast("AnySpan", full.get(id(span), span)) for span in spans]


def _with(span: Span, messages: list[Any] | None) -> Span:
    left_out = {semconv.LLM_MESSAGES_CALL, semconv.LLM_MESSAGES_BEFORE, *((INPUT, OUTPUT) if messages is None else ())}
    held = {key: value for key, value in span.attributes.items() if key not in left_out}
    return span.model_copy(update={"attributes": held if messages is None else {**held, INPUT: messages}})


def _messages(span: Span) -> list[Any] | None:
    value: Any = span.attributes.get(INPUT)
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return cast("list[Any]", found) if isinstance(found, list) else None


def _number(span: Span, key: str) -> int:
    return int(span.attributes.get(key, 0))


def _call(span: Span, key: str) -> Call:
    return span.rollout_id, span.attempt_id, str(span.attributes.get(semconv.PROCESS, "")), _number(span, key)
