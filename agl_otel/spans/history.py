"""Expand calls that our proxy stored in prefix form, with a reference to an earlier call instead of a repetition. Pure.

Messages: `agentlightning.llm.messages_call` refers to an earlier call of the same attempt and process, `.messages_before` is how many of
its messages come first, and `gen_ai.input.messages` has the messages after them. Tools: `.tools_call` refers to the call that has the
same `gen_ai.tool.definitions`. Token ids: `agentlightning.llm.prefix_call` and `.prefix_choice` refer to the call whose prompt and
response come first. A chain of references ends at a call that is stored in full. If a call of the chain is missing or unreadable, the
result is empty: half a conversation could be mistaken for a whole one.

A few bytes can refer to megabytes repeatedly, so the expanded size of an attempt is computed first, and nothing of it is expanded beyond
MAX_TOKENS or MAX_CHARACTERS.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from agl_otel.errors import SpanShapeError
from agl_otel.spans.dialects.dialect import numbers
from agl_otel.spans.tolerant import json_of, whole_of
from agl_otel.types import Span
from agl_otel_hook import conventions

INPUT: Final = "gen_ai.input.messages"
OUTPUT: Final = "gen_ai.output.messages"
TOOLS: Final = "gen_ai.tool.definitions"
MAX_TOKENS: Final = 1 << 26  # ids in the expanded prompts of one attempt, 256 MiB: 2,000 calls of 32,000 each
SHARED: Final = 16  # tokens in shared memory that count as one
MAX_CHARACTERS: Final = 1 << 27  # of JSON in the expanded messages of one attempt: 1,000 calls of 32,000 tokens each
MESSAGE_CHARACTERS: Final = 64  # overhead of a message: its entries in the lists of this and later calls
_log = logging.getLogger(__name__)
TokenIds = NDArray[np.int32]
Place = tuple[str, str, str, int]
"""(rollout, attempt, process, call)."""
AttemptKey = tuple[str, str]
"""(rollout, attempt)."""
SpanKey = tuple[str, str]
"""(trace id, span id)."""
AnySpan = TypeVar("AnySpan")
NOWHERE: Final = -1  # a reference to no call
_NONE: Final = np.zeros(0, np.int32)


# --- messages -----------------------------------------------------------------------------------------------------


def expand_spans(spans: Sequence[AnySpan]) -> Sequence[AnySpan]:
    """Expand the messages of calls in prefix form, to lists, and add tool definitions of earlier calls; other spans are unchanged.

    Raises SpanShapeError that names an attempt whose messages exceed MAX_CHARACTERS; of tool definitions it only warns.
    """
    calls = [span for span in spans if isinstance(span, Span) and conventions.LLM_CALL in span.attributes]
    calls.sort(key=lambda span: (_number(span, conventions.LLM_CALL), _number(span, conventions.LLM_CHOICE)))
    places = [place_of(span, conventions.LLM_CALL) for span in calls]
    whole = _with_histories(places, _with_tools(places, calls))
    expanded = {id(span): made for span, made in zip(calls, whole, strict=True) if made is not span}
    return [cast("AnySpan", expanded.get(id(span), span)) for span in spans] if expanded else spans


def _with_histories(places: Sequence[Place], calls: Sequence[Span]) -> Sequence[Span]:
    if not any(conventions.LLM_MESSAGES_CALL in span.attributes for span in calls):
        return calls
    asked = [span.attributes.get(INPUT) for span in calls]
    base = [_number(span, conventions.LLM_MESSAGES_CALL) for span in calls]
    before = [_number(span, conventions.LLM_MESSAGES_BEFORE) for span in calls]
    stored = list(map(_messages_in, asked))
    for key, count in _too_many_characters(places, asked, stored, base, before).items():
        raise SpanShapeError(_too_large(key, f"{count} characters", MAX_CHARACTERS))
    histories = expand_messages(places, stored, base, before)
    return [
        _with_messages(span, history) if conventions.LLM_MESSAGES_CALL in span.attributes else span
        for span, history in zip(calls, histories, strict=True)
    ]


def expand_texts(places: Sequence[Place], asked: Sequence[str], base: Sequence[int], before: Sequence[int]) -> list[str]:
    """Return the full message history of each call, as JSON, from columns.

    Args:
        places: the calls, sorted; choices of one call are adjacent.
        asked: the stored messages, as JSON.
        base: the call (of the same attempt and process) with the first `before` messages; 0: all messages are stored.
        before: the number of messages taken from `base`.

    The history of a call in prefix form is empty if its attempt exceeds MAX_CHARACTERS; a warning names the attempt.
    """
    stored = list(map(_messages_in, asked))
    large = _too_many_characters(places, asked, stored, base, before)
    for key, count in large.items():
        _log.warning("%s", _too_large(key, f"{count} characters", MAX_CHARACTERS))
    known = base if not large else [NOWHERE if each and place[:2] in large else each for place, each in zip(places, base, strict=True)]
    histories = expand_messages(places, stored, known, before)
    return [
        text if not earlier else json.dumps(history) if history is not None else ""
        for text, earlier, history in zip(asked, base, histories, strict=True)
    ]


def expand_tools(places: Sequence[Place], stored: Sequence[str], base: Sequence[int]) -> list[str]:
    """Return the tool definitions of each call, as JSON, from columns; `base` is the call that has them, 0: they are `stored`.

    Those of an attempt that exceeds MAX_CHARACTERS stay as stored; a warning names it.
    """
    known = {place: text for place, text in zip(places, stored, strict=True) if text}
    found = [known.get((*place[:3], earlier), "") if earlier else text for place, text, earlier in zip(places, stored, base, strict=True)]
    whole = Counter[AttemptKey]()
    for place, text in zip(places, found, strict=True):
        whole[place[:2]] += len(text)
    large = {key: count for key, count in whole.items() if count > MAX_CHARACTERS}
    for key, count in large.items():
        _log.warning("%s", _too_large(key, f"{count} characters of tool definitions", MAX_CHARACTERS))
    return [text if place[:2] in large else full for place, text, full in zip(places, stored, found, strict=True)]


def _with_tools(places: Sequence[Place], calls: Sequence[Span]) -> Sequence[Span]:
    if not any(conventions.LLM_TOOLS_CALL in span.attributes for span in calls):
        return calls
    stored = [str(span.attributes.get(TOOLS, "")) for span in calls]
    base = [_number(span, conventions.LLM_TOOLS_CALL) for span in calls]
    whole: list[Span] = []
    for span, earlier, text in zip(calls, base, expand_tools(places, stored, base), strict=True):
        if earlier:
            held = {key: value for key, value in span.attributes.items() if key != conventions.LLM_TOOLS_CALL}
            span = span.model_copy(update={"attributes": held | ({TOOLS: text} if text else {})})
        whole.append(span)
    return whole


def expand_messages(
    places: Sequence[Place], stored: Sequence[list[Any] | None], base: Sequence[int], before: Sequence[int]
) -> list[list[Any] | None]:
    """Return the full message history of each call, None if unknown. Arguments as in `expand_texts`; `stored` are parsed messages."""
    known: dict[Place, list[Any] | None] = {}
    histories: list[list[Any] | None] = []
    for place, messages, earlier, count in zip(places, stored, base, before, strict=True):
        if earlier:
            first = known.get((*place[:3], earlier))
            messages = [*first[:count], *messages] if first is not None and messages is not None and 0 <= count <= len(first) else None
        known.setdefault(place, messages)  # the first choice's
        histories.append(messages)
    return histories


def _too_many_characters(
    places: Sequence[Place], asked: Sequence[Any], stored: Sequence[list[Any] | None], base: Sequence[int], before: Sequence[int]
) -> dict[AttemptKey, int]:
    """{attempt: characters} of attempts whose calls in prefix form exceed MAX_CHARACTERS; counting stops there."""
    held, calls = Counter[AttemptKey](), Counter[AttemptKey]()
    for place, text, messages, earlier in zip(places, asked, stored, base, strict=True):
        held[place[:2]] += (len(text) if isinstance(text, str) else _characters(messages)) + MESSAGE_CHARACTERS * len(messages or ())
        calls[place[:2]] += bool(earlier)
    suspected = {key for key, count in calls.items() if count * held[key] > MAX_CHARACTERS}  # few honest attempts
    ends: dict[Place, NDArray[np.int64]] = {}
    whole = Counter[AttemptKey]()
    for place, messages, earlier, count in zip(places, stored, base, before, strict=True):
        key = place[:2]
        if key in suspected and messages is not None and whole[key] <= MAX_CHARACTERS:
            own = np.cumsum([0, *(_characters(message) + MESSAGE_CHARACTERS for message in messages)])
            if earlier:
                first = ends.get((*place[:3], earlier))
                if first is None or not 0 <= count < len(first):
                    continue
                own = np.append(first[:count], first[count] + own)
                whole[key] += int(own[-1])
            ends.setdefault(place, own)
    return {key: count for key, count in whole.items() if count > MAX_CHARACTERS}


def _characters(value: Any) -> int:
    return len(json.dumps(value, default=str, skipkeys=True))


def _too_large(key: AttemptKey, count: str, most: int) -> str:
    return (
        f"the model calls of attempt {key[1]} of rollout {key[0]} are not expanded: their prompts go on from earlier ones and have "
        f"{count} in all, more than {most}; what each call has of its own is stored, and SQL reads it"
    )


def _messages_in(value: Any) -> list[Any] | None:
    """Return a list of messages, parsed if it is JSON; None if it is not a list."""
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
    """The place of the call whose number is in the attribute `call`."""
    return span.rollout_id, span.attempt_id, str(span.attributes.get(conventions.PROCESS, "")), _number(span, call)


def _number(span: Span, key: str) -> int:
    return whole_of(span.attributes.get(key, 0))


# --- token ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredCall:
    """One (call, choice) as stored: unless `prefix_call` is 0, `prompt` has only the tokens after that call and choice."""

    call: int
    choice: int
    prefix_call: int
    prefix_choice: int
    prompt: TokenIds
    response: TokenIds


def expand_prompts(spans: Iterable[Span]) -> dict[SpanKey, TokenIds]:
    """Return {span: full prompt} of each call in prefix form; an empty prompt if its chain is broken.

    Raises SpanShapeError that names an attempt whose prompts exceed MAX_TOKENS.
    """
    processes = _processes(spans)
    tokens = Counter[AttemptKey]()
    for place, calls in processes.items():
        tokens[place[:2]] += tokens_to_expand([stored for stored, _ in calls])
    for key, count in tokens.items():
        if count > MAX_TOKENS:
            raise SpanShapeError(_too_large(key, f"{count} tokens", MAX_TOKENS))
    found: dict[SpanKey, TokenIds] = {}
    for calls in processes.values():
        for (stored, span), prompt in zip(calls, full_prompts([stored for stored, _ in calls]), strict=True):
            if stored.prefix_call:
                found[span.trace_id, span.span_id] = _NONE if prompt is None else prompt
    return found


def lengths_of_prompts(spans: Iterable[Span]) -> dict[SpanKey, int]:
    """Return {span: length of its full prompt} of each call in prefix form, without expanding; 0 if its chain is broken."""
    return {
        (span.trace_id, span.span_id): length or 0
        for calls in _processes(spans).values()
        for (stored, span), length in zip(calls, prompt_lengths([stored for stored, _ in calls]), strict=True)
        if stored.prefix_call
    }


def whole_prompt(spans: Iterable[Span], key: SpanKey) -> TokenIds | None:
    """Expand the prompt of one call only; empty if its chain is broken, None if it is not in prefix form."""
    for calls in _processes(spans).values():
        chain = [stored for stored, span in calls if (span.trace_id, span.span_id) == key and stored.prefix_call]
        if not chain:
            continue
        places = {(stored.call, stored.choice): stored for stored, _ in calls}
        while (base := places.get((chain[-1].prefix_call, chain[-1].prefix_choice))) is not None and base.call < chain[-1].call:
            chain.append(base)
        prompt = full_prompts(chain[::-1])[-1]
        return _NONE if prompt is None else prompt
    return None


def _processes(spans: Iterable[Span]) -> dict[tuple[str, str, str], list[tuple[StoredCall, Span]]]:
    """{(rollout, attempt, process): its sorted calls} of processes with a call in prefix form."""
    found: dict[tuple[str, str, str], list[Span]] = {}
    for span in spans:
        if conventions.LLM_CALL in span.attributes:
            found.setdefault(place_of(span, conventions.LLM_CALL)[:3], []).append(span)
    return {
        place: sorted(((_stored(span), span) for span in calls), key=lambda entry: (entry[0].call, entry[0].choice))
        for place, calls in found.items()
        if any(conventions.LLM_PREFIX_CALL in span.attributes for span in calls)
    }


def tokens_to_expand(calls: Sequence[StoredCall], *, in_place: bool = False) -> int:
    """Count the token ids in the full prompts of calls in prefix form; `calls` are those of `full_prompts`.

    `in_place`: the arrays of `full_prompts` are used without a copy. The first call that continues another one then shares its memory, and
    counts 1/SHARED.
    """
    extended: set[tuple[int, int]] = set()
    tokens = 0
    for stored, length in zip(calls, prompt_lengths(calls), strict=True):
        if stored.prefix_call and length:
            base = (stored.prefix_call, stored.prefix_choice)
            tokens += length // SHARED if in_place and base not in extended else length
            extended.add(base)
    return tokens


def prompt_lengths(calls: Sequence[StoredCall]) -> list[int | None]:
    """Return the lengths of the results of `full_prompts`."""
    ends: dict[tuple[int, int], int] = {}
    lengths: list[int | None] = []
    for stored in calls:
        length: int | None = len(stored.prompt)
        if stored.prefix_call:
            base = ends.get((stored.prefix_call, stored.prefix_choice)) if stored.prefix_call < stored.call else None
            length = None if base is None else base + len(stored.prompt)
        lengths.append(length)
        if length and len(stored.response):
            ends[stored.call, stored.choice] = length + len(stored.response)
    return lengths


def full_prompts(calls: Sequence[StoredCall]) -> list[TokenIds | None]:
    """Return the full prompt of each call of one attempt and process, sorted by (call, choice); None if a reference is invalid.

    A valid reference names an earlier call that is present, with known prompt and response.
    """
    referenced = {(stored.prefix_call, stored.prefix_choice) for stored in calls if stored.prefix_call}
    known: dict[tuple[int, int], _Grown] = {}
    prompts: list[TokenIds | None] = []
    for stored, length in zip(calls, prompt_lengths(calls), strict=True):
        if length is None:
            prompts.append(None)
            continue
        goes_on = (stored.call, stored.choice) in referenced
        whole = _Grown(stored.prompt)
        if stored.prefix_call:
            whole = known[stored.prefix_call, stored.prefix_choice].plus(stored.prompt, spare=goes_on)
        prompts.append(whole.tokens)
        if goes_on and length and len(stored.response):
            known[stored.call, stored.choice] = whole.plus(stored.response)
    return prompts


class _Grown:
    """Extensible tokens. The first extension shares the memory, so a conversation of n calls is in memory once, not n times."""

    def __init__(self, tokens: TokenIds, room: TokenIds | None = None) -> None:
        self.tokens = tokens
        self._room = room
        """A buffer of ours that begins with the tokens; None if it is taken, or if the tokens are the stored ones (read-only)."""

    def plus(self, more: TokenIds, *, spare: bool = True) -> _Grown:
        """Return these tokens followed by `more`; with `spare` in a buffer with room for further ones."""
        length = len(self.tokens)
        end = length + len(more)
        room, self._room = self._room, None
        if room is None or end > len(room):
            room = np.empty(2 * end if spare else end, np.int32)
            room[:length] = self.tokens
        room[length:end] = more
        return _Grown(room[:end], room)


def _stored(span: Span) -> StoredCall:
    return StoredCall(
        call=_number(span, conventions.LLM_CALL),
        choice=_number(span, conventions.LLM_CHOICE),
        prefix_call=_number(span, conventions.LLM_PREFIX_CALL),
        prefix_choice=_number(span, conventions.LLM_PREFIX_CHOICE),
        prompt=_ids(span.attributes.get(conventions.LLM_PROMPT_TOKEN_IDS)),
        response=_ids(span.attributes.get(conventions.LLM_RESPONSE_TOKEN_IDS)),
    )


def _ids(value: Any) -> TokenIds:
    """Return token ids; empty if the value is not a list as our proxy writes it."""
    ids = numbers(value) if isinstance(value, (list, tuple)) else []
    return np.array(ids if all(type(each) is int and 0 <= each < 1 << 31 for each in ids) else [], np.int32)
