"""An answer, whole or streamed, put together from its JSON payloads by a dialect. Pure; what is malformed is left out, never an error."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

from pydantic_core import from_json, to_json

Json = dict[str, Any]
MAX_TOKEN_ID: Final = (1 << 31) - 1  # readers keep ids in 32 bits, signed
MAX_IDS: Final = 1 << 21  # of a prompt, and of all choices of a reply together: the collectors take as many in one list of a span
MAX_EVENT_BYTES: Final = 64 << 20
MAX_EVENT_LINES: Final = 10_000  # an object for each would be made to read the data that they hold
MAX_CHOICES: Final = 1024  # OpenAI's servers make 128 at most
MAX_BRACKETS: Final = 4_000_000  # of one JSON text: each object and list takes up to 200 bytes for the two or three of its text
MAX_COMMAS: Final = (
    1 << 23
)  # the same: a number takes 30 bytes for the two of its text; 32,000 tokens with twenty log-probs each are some 4 million
_spelled: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_BLANK: Final = b" \t\r\n"  # what JSON calls white space


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, in the pieces in which it came: putting each onto a text would copy the text each time."""

    id: Any = None
    name: list[str] = field(default_factory=list[str])
    arguments: list[str] = field(default_factory=list[str])
    given: Any = None
    """Arguments that came as an object (Messages)."""


@dataclass(slots=True)
class Choice:
    """One of the n replies."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tool_calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])
    finish_reason: str | None = None

    def logprobs_defect(self) -> str | None:
        """Why there is not one finite log-prob for each token of the reply; None where there is."""
        if not self.logprobs:
            return "no_logprobs"
        if len(self.logprobs) != len(self.token_ids):
            return "logprobs_length"
        return None if all(map(math.isfinite, self.logprobs)) else "logprobs_not_finite"


@dataclass(slots=True)
class Reply:
    """What is known of the answer so far."""

    id: str | None = None
    model: str | None = None
    prompt_token_ids: list[int] | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    bad_ids: bool = False
    """Token ids came that are no ids: no integers, negative, or beyond 31 bits."""
    too_many_ids: bool = False
    """More than MAX_IDS came; those beyond are not kept."""
    sampled: int = 0
    """Tokens whose ids or log-probs came."""
    several_prompts: bool = False
    """Choices came whose prompts are not the same."""
    mixed_choices: bool = False
    """Choices came of which nobody can say which is which: they are held as one."""

    def choice(self, index: Any = 0) -> Choice:
        """The choice of that number; one that is not kept, and an error, beyond MAX_CHOICES."""
        number = integer(index) or 0
        if number not in self.choices and len(self.choices) >= MAX_CHOICES:
            self.error = self.error or f"the model server answered with more than {MAX_CHOICES} choices"
            return Choice()
        return self.choices.setdefault(number, Choice())

    def head(self, payload: Json, usage_names: tuple[str, str]) -> None:
        """Take id, model, usage and error, which every dialect has."""
        self.id = self.id or string(payload.get("id"))
        self.model = self.model or string(payload.get("model"))
        self.prompt(payload)
        usage = payload.get("usage")
        if isinstance(usage, dict):
            numbers = cast("Json", usage)
            given = [integer(numbers.get(name)) for name in usage_names]
            self.input_tokens = given[0] if given[0] is not None else self.input_tokens
            self.output_tokens = given[1] if given[1] is not None else self.output_tokens
        if payload.get("error") is not None:
            error = payload["error"]
            self.error = str(cast("Json", error).get("message", error) if isinstance(error, dict) else error)

    def prompt(self, part: Json) -> None:
        """Take the prompt's token ids, where `part` has them."""
        given = part.get("prompt_token_ids")
        if self.prompt_token_ids is None:
            self.prompt_token_ids = self.ids(given) or None
        elif given and given != self.prompt_token_ids:
            self.several_prompts = True

    def tokens(self, choice: Choice, part: Json) -> None:
        """Take token ids and log-probs of a choice, where `part` has them."""
        ids, logprobs = self.ids(part.get("token_ids")), logprobs_of(part.get("logprobs"))
        self.sampled += max(len(ids), len(logprobs))
        if self.sampled > MAX_IDS:
            self.too_many_ids = True
            return
        choice.token_ids += ids
        choice.logprobs += logprobs

    def ids(self, value: Any) -> list[int]:
        """`value` as token ids; none, and noted, where it holds anything that is no id, or more than MAX_IDS."""
        if not value:
            return []
        if isinstance(value, list) and len(cast("list[Any]", value)) > MAX_IDS:
            self.too_many_ids = True
            return []
        if isinstance(value, list) and set(map(type, cast("list[Any]", value))) == {int}:
            numbers = cast("list[int]", value)
            if min(numbers) >= 0 and max(numbers) <= MAX_TOKEN_ID:
                return numbers
        self.bad_ids = True
        return []


class Events:
    """Cuts a stream of server-sent events into events, as they arrive in pieces. Works on bytes: a piece may end inside a character."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that are whole by now, with the blank lines that end them. Each byte is looked at once."""
        if not self._rest and piece.endswith(b"\n\n") and piece.find(b"\n\n") == len(piece) - 2 and b"\r" not in piece:
            return [piece]  # nearly always: a server writes an event at a time
        looked_at = max(0, len(self._rest) - 2)  # a blank line may have begun there
        self._rest.extend(piece)
        events: list[bytes] = []
        at = 0
        for blank in _BLANK_LINE.finditer(self._rest, looked_at):
            events.append(bytes(self._rest[at : blank.end()]))
            at = blank.end()
        del self._rest[:at]
        if len(self._rest) > MAX_EVENT_BYTES:
            events.append(bytes(self._rest))
            self._rest.clear()
        return events

    def rest(self) -> bytes:
        """What has come after the last whole event."""
        return bytes(self._rest)


def payload_of(event: bytes) -> Json | None:
    """The JSON object in a server-sent event; None for comments, [DONE], what is no JSON object, and what `is_crowded_event`."""
    at = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
    if not at and event[:5] != b"data:":
        return None
    payload = parse_object(event[at + 5 :])  # nearly always all of it is the data
    return payload if payload is not None or _has_many_lines(event) else parse_object(_data_of(event))


def _has_many_lines(event: bytes) -> bool:
    return len(event) > MAX_EVENT_LINES and event.count(b"\n") + event.count(b"\r") > MAX_EVENT_LINES


def is_crowded_event(event: bytes) -> bool:
    """Whether it is not read because it is too long, or holds too many lines or values."""
    return len(event) > MAX_EVENT_BYTES or _has_many_lines(event) or is_crowded(event)


def _data_of(event: bytes) -> bytes:
    """The data of an event that may spread over lines, with other fields between and after."""
    return b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))


def with_payload(event: bytes, payload: Json) -> bytes:
    """The event with `payload` in place of its own; its other lines stay, before it."""
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*others, b"data: " + encoded(payload)]) + b"\n\n"


def with_fields(raw: bytes, payload: Json, fields: Json) -> bytes:
    """The JSON object `raw`, which reads as `payload`, with some fields set; its other bytes stay as they are wherever that is safe.

    A long conversation is so neither written out again with every call, nor changed in how it is spelled.
    """
    if not fields:
        return raw
    text = raw.strip(_BLANK)
    if text[:1] != b"{" or b"\0" in text[:4] or not payload:  # another encoding than UTF-8, or nothing in it
        return json.dumps(payload | fields).encode()
    missing = {name: value for name, value in fields.items() if name not in payload}
    for name in fields.keys() - missing.keys():
        key = json.dumps(name).encode()
        places = list(_scalar_of(key).finditer(text)) if text.count(key) == 1 else []
        if len(places) != 1 or (b"\\u00" in text and _depth(text[: places[0].start()]) != 1):
            return json.dumps(payload | fields).encode()  # the name stands elsewhere too, or is spelled with escapes, or holds an object
        start, end = places[0].span(1)
        text = text[:start] + json.dumps(fields[name]).encode() + text[end:]
    return text[:-1] + b"," + json.dumps(missing).encode()[1:] if missing else text


_IN_STRING: Final = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # possessive: what could be tried again takes 120 bytes for each character
_STRING: Final = re.compile(b'"' + _IN_STRING + b'"', re.DOTALL)


def _depth(beginning: bytes) -> int:
    """How many objects and lists are open at the end of the beginning of a JSON text."""
    bare = _STRING.sub(b"", beginning)
    return bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")


@cache
def _scalar_of(key: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?<!\\)" + re.escape(key) + rb'\s*:\s*("' + _IN_STRING + rb'"|[-+.\w]+)(?=\s*[,}])', re.DOTALL)


def dense(value: Any) -> str:
    """A value as JSON, without blanks."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except ValueError:  # lone surrogates, and what is nested deeper than it likes
        return _spelled(value)


def encoded(payload: Json) -> bytes:
    """JSON as servers write it; with escapes where it holds what UTF-8 cannot."""
    try:
        return to_json(payload, inf_nan_mode="constants")
    except ValueError:
        return json.dumps(payload, separators=(",", ":")).encode()


def is_crowded(text: bytes) -> bool:
    """Whether a JSON text is not read because it holds too many values."""
    return (len(text) > MAX_BRACKETS and text.count(b"{") + text.count(b"[") > MAX_BRACKETS) or (
        len(text) > MAX_COMMAS and text.count(b",") > MAX_COMMAS
    )


def parse_object(text: bytes) -> Json | None:
    """The JSON object that `text` is; None where it is none, or `is_crowded`."""
    if is_crowded(text):
        return None
    try:
        payload = from_json(text)
    except ValueError:
        try:
            payload = json.loads(text)  # takes what the quick one does not: other encodings, lone surrogates, deep nesting
        except (ValueError, RecursionError):
            return None
    return cast("Json", payload) if isinstance(payload, dict) else None


def logprobs_of(value: Any) -> list[float]:
    """The log-probs in a choice's `logprobs`, chat's or completions' form; what is no number is NaN."""
    if not isinstance(value, dict):
        return []
    held = cast("Json", value)
    content: Any = held.get("content")
    try:
        numbers: list[Any] = [item["logprob"] for item in content] if content else held.get("token_logprobs") or []
        return [number if type(number) is float else float(number) if type(number) is int else math.nan for number in numbers]
    except (TypeError, KeyError, OverflowError):
        return [math.nan]


def dicts(value: Any) -> list[Json]:
    """The JSON objects in a list; none where it is no list."""
    return [cast("Json", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str | None:
    """`value`, where it is a string (any lone surrogate in it replaced)."""
    if not isinstance(value, str):
        return None
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def integer(value: Any) -> int | None:
    """`value`, where it is an integer and no bool, of 64 bits."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None
