"""Conversations in full: our proxy stores of a call's messages only what is new, and names the earlier call that has the rest. Pure.

`agentlightning.llm.messages_call` names that call (of the same attempt and process), `.messages_before` says how many of its messages
come first; `gen_ai.input.messages` holds what follows them. The chain of calls goes back to one that holds all of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

from agl_otel.spans.tolerant import whole_of
from agl_otel.traces.told import Place, messages_in, whole_messages
from agl_otel.types import Span
from agl_otel_hook import conventions

INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
AnySpan = TypeVar("AnySpan")


def in_full(spans: Sequence[AnySpan]) -> Sequence[AnySpan]:
    """The spans, those of calls that go on from another one with all their messages, as a list; all others as they are.

    A call whose history is not among the spans, or cannot be read, comes without messages: half a conversation would be taken for one.
    """
    told = [span for span in spans if isinstance(span, Span) and conventions.LLM_CALL in span.attributes]
    if not any(conventions.LLM_MESSAGES_CALL in span.attributes for span in told):
        return spans
    told.sort(key=lambda span: (_number(span, conventions.LLM_CALL), _number(span, conventions.LLM_CHOICE)))
    wholes = whole_messages(
        [_place(span) for span in told],
        [messages_in(span.attributes.get(INPUT)) for span in told],
        [_number(span, conventions.LLM_MESSAGES_CALL) for span in told],
        [_number(span, conventions.LLM_MESSAGES_BEFORE) for span in told],
    )
    full = {
        id(span): _with(span, whole) for span, whole in zip(told, wholes, strict=True) if conventions.LLM_MESSAGES_CALL in span.attributes
    }
    return [cast("AnySpan", full.get(id(span), span)) for span in spans]


def _with(span: Span, messages: list[Any] | None) -> Span:
    left_out = {conventions.LLM_MESSAGES_CALL, conventions.LLM_MESSAGES_BEFORE, *((INPUT, OUTPUT) if messages is None else ())}
    held = {key: value for key, value in span.attributes.items() if key not in left_out}
    return span.model_copy(update={"attributes": held if messages is None else {**held, INPUT: messages}})


def _number(span: Span, key: str) -> int:
    return whole_of(span.attributes.get(key, 0))


def _place(span: Span) -> Place:
    return span.rollout_id, span.attempt_id, str(span.attributes.get(conventions.PROCESS, "")), _number(span, conventions.LLM_CALL)
