"""Expand calls that our proxy stored in prefix form: what an earlier call holds already is named there, not repeated. Pure.

Messages: `agentlightning.llm.messages_call` names an earlier call of the same attempt and process, `.messages_before` how many of its
messages come first, and `gen_ai.input.messages` holds what follows them. Token ids: `agentlightning.llm.prefix_call` and `.prefix_choice`
name the call whose prompt and response come first. A chain of calls goes back to one that holds all of its own. Where a call of the chain
is not there, or cannot be read, the result is empty: half a conversation would be taken for a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from agl_otel.spans.dialects.dialect import numbers
from agl_otel.spans.tolerant import json_of, whole_of
from agl_otel.types import Span
from agl_otel_hook import conventions

INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
TokenIds = NDArray[np.int32]
Place = tuple[str, str, str, int]
"""(rollout, attempt, process, call)."""
SpanKey = tuple[str, str]
"""(trace id, span id)."""
AnySpan = TypeVar("AnySpan")


# --- messages -----------------------------------------------------------------------------------------------------


def expand_spans(spans: Sequence[AnySpan]) -> Sequence[AnySpan]:
    """The spans, those of calls in prefix form with all their messages, as a list; all others as they are."""
    calls = [span for span in spans if isinstance(span, Span) and conventions.LLM_CALL in span.attributes]
    if not any(conventions.LLM_MESSAGES_CALL in span.attributes for span in calls):
        return spans
    calls.sort(key=lambda span: (_number(span, conventions.LLM_CALL), _number(span, conventions.LLM_CHOICE)))
    histories = expand_messages(
        [place_of(span, conventions.LLM_CALL) for span in calls],
        [_messages_in(span.attributes.get(INPUT)) for span in calls],
        [_number(span, conventions.LLM_MESSAGES_CALL) for span in calls],
        [_number(span, conventions.LLM_MESSAGES_BEFORE) for span in calls],
    )
    expanded = {
        id(span): _with_messages(span, history)
        for span, history in zip(calls, histories, strict=True)
        if conventions.LLM_MESSAGES_CALL in span.attributes
    }
    return [cast("AnySpan", expanded.get(id(span), span)) for span in spans]


def expand_texts(places: Sequence[Place], asked: Sequence[str], base: Sequence[int], before: Sequence[int]) -> list[str]:
    """The whole message history of every call, as JSON, from columns.

    Args:
        places: of the calls, sorted; choices of one call follow each other.
        asked: the stored messages, as JSON.
        base: the call (of the same attempt and process) that has the first `before` of them; 0: all of them are stored.
        before: how many.
    """
    histories = expand_messages(places, [_messages_in(text) for text in asked], base, before)
    return [
        text if not earlier else json.dumps(history) if history is not None else ""
        for text, earlier, history in zip(asked, base, histories, strict=True)
    ]


def expand_messages(
    places: Sequence[Place], stored: Sequence[list[Any] | None], base: Sequence[int], before: Sequence[int]
) -> list[list[Any] | None]:
    """The whole message history of every call; the arguments are those of `expand_texts`, `stored` its messages read. None: not known."""
    known: dict[Place, list[Any] | None] = {}
    histories: list[list[Any] | None] = []
    for place, messages, earlier, count in zip(places, stored, base, before, strict=True):
        if earlier:
            first = known.get((*place[:3], earlier))
            messages = [*first[:count], *messages] if first is not None and messages is not None and len(first) >= count else None
        known.setdefault(place, messages)  # the first choice's
        histories.append(messages)
    return histories


def _messages_in(value: Any) -> list[Any] | None:
    """A list of messages, which may be JSON; None where it is none."""
    try:
        found = json_of(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return cast("list[Any]", found) if isinstance(found, list) else None


def _with_messages(span: Span, messages: list[Any] | None) -> Span:
    left_out = {conventions.LLM_MESSAGES_CALL, conventions.LLM_MESSAGES_BEFORE, *((INPUT, OUTPUT) if messages is None else ())}
    held = {key: value for key, value in span.attributes.items() if key not in left_out}
    return span.model_copy(update={"attributes": held if messages is None else {**held, INPUT: messages}})


def place_of(span: Span, call: str) -> Place:
    """The place of the call whose number the attribute `call` holds."""
    return span.rollout_id, span.attempt_id, str(span.attributes.get(conventions.PROCESS, "")), _number(span, call)


def _number(span: Span, key: str) -> int:
    return whole_of(span.attributes.get(key, 0))


# --- token ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredCall:
    """One (call, choice) as stored: where `prefix_call` is not 0, `prompt` holds only what follows that call and choice."""

    call: int
    choice: int
    prefix_call: int
    prefix_choice: int
    prompt: TokenIds
    response: TokenIds


def expand_prompts(spans: Iterable[Span]) -> dict[SpanKey, list[int]]:
    """{span: full prompt} of every call that is stored in prefix form; [] where its chain is broken."""
    processes: dict[tuple[str, str, str], list[tuple[int, int, Span]]] = {}
    for span in spans:
        if (call := span.attributes.get(conventions.LLM_CALL)) is not None:
            marker = str(span.attributes.get(conventions.PROCESS, ""))
            key = (whole_of(call), whole_of(span.attributes.get(conventions.LLM_CHOICE, 0)), span)
            processes.setdefault((span.rollout_id, span.attempt_id, marker), []).append(key)
    found: dict[SpanKey, list[int]] = {}
    for calls in processes.values():
        if any(conventions.LLM_PREFIX_CALL in span.attributes for _, _, span in calls):
            calls.sort(key=lambda entry: entry[:2])
            prompts = full_prompts([_stored(*entry) for entry in calls])
            for (_, _, span), prompt in zip(calls, prompts, strict=True):
                if span.attributes.get(conventions.LLM_PREFIX_CALL):
                    found[span.trace_id, span.span_id] = [] if prompt is None else prompt.tolist()
    return found


def full_prompts(calls: Sequence[StoredCall]) -> list[TokenIds | None]:
    """The full prompt of each call of one attempt and process, sorted by (call, choice); None where a reference leads nowhere.

    A reference must name an earlier call that is there, and whose own prompt and response are known.
    """
    referenced = {(stored.prefix_call, stored.prefix_choice) for stored in calls if stored.prefix_call}
    known: dict[tuple[int, int], _Grown] = {}
    prompts: list[TokenIds | None] = []
    for stored in calls:
        whole: _Grown | None = _Grown(stored.prompt)
        if stored.prefix_call:
            base = known.get((stored.prefix_call, stored.prefix_choice)) if stored.prefix_call < stored.call else None
            whole = None if base is None else base.plus(stored.prompt)
        prompts.append(whole.tokens if whole is not None else None)
        if whole is not None and len(whole.tokens) and len(stored.response) and (stored.call, stored.choice) in referenced:
            known[stored.call, stored.choice] = whole.plus(stored.response)
    return prompts


class _Grown:
    """Tokens that later calls extend. The first extension shares the memory, so a conversation of n calls is there once and not n times."""

    def __init__(self, tokens: TokenIds, room: TokenIds | None = None) -> None:
        self.tokens = tokens
        self._room = room
        """Memory of ours that begins with the tokens; None where there is none left: what is stored is not written to."""

    def plus(self, more: TokenIds) -> _Grown:
        """These tokens and `more`."""
        length = len(self.tokens)
        end = length + len(more)
        room, self._room = self._room, None
        if room is None or end > len(room):
            room = np.empty(2 * end, np.int32)
            room[:length] = self.tokens
        room[length:end] = more
        return _Grown(room[:end], room)


def _stored(call: int, choice: int, span: Span) -> StoredCall:
    a = span.attributes
    base, base_choice = (whole_of(a.get(key, 0)) for key in (conventions.LLM_PREFIX_CALL, conventions.LLM_PREFIX_CHOICE))
    return StoredCall(
        call, choice, base, base_choice, _ids(a.get(conventions.LLM_PROMPT_TOKEN_IDS)), _ids(a.get(conventions.LLM_RESPONSE_TOKEN_IDS))
    )


def _ids(value: Any) -> TokenIds:
    """Token ids; none where the value is not the list of them that our proxy writes."""
    ids = numbers(value) if isinstance(value, (list, tuple)) else []
    return np.array(ids if all(type(each) is int and 0 <= each < 1 << 31 for each in ids) else [], np.int32)
