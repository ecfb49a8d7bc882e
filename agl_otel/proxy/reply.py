"""Assemble an answer, whole or streamed, from its JSON payloads. Pure; malformed parts are skipped, never an error."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

from pydantic_core import from_json, to_json

Json = dict[str, Any]
MAX_TOKEN_ID: Final = (1 << 31) - 1  # readers store ids as signed 32-bit integers
MAX_IDS: Final = 1 << 21  # of a prompt, and of all choices of a reply together; the collectors' limit for a list in a span
MAX_EVENT_BYTES: Final = 64 << 20
MAX_EVENT_LINES: Final = 10_000  # parsing creates an object for each line
MAX_CHOICES: Final = 1024  # OpenAI's servers make 128 at most
MAX_BRACKETS: Final = 4_000_000  # of one JSON text: each object or list of two or three bytes takes up to 200 in memory
UNFINISHED: Final = {
    "abort": "upstream_aborted",
    "cancelled": "upstream_aborted",
    "error": "upstream_failed",
    "failed": "upstream_failed",
    "content_filter": "upstream_filtered",
    "refusal": "upstream_filtered",
    "incomplete": "upstream_ended_early",
    "in_progress": "upstream_ended_early",
    "queued": "upstream_ended_early",
}
"""{finish reason of a reply that is not whole: why}. Others, known or not, end a whole one."""
MAX_LOGPROB: Final = 1e-3
"""Logits minus their log-sum-exp err in float32 by 6e-5 for logits of 1,000; what is above is no log-prob."""
MAX_COMMAS: Final = (
    1 << 23
)  # of one JSON text: a number of two bytes takes 30 in memory; 32,000 tokens with twenty log-probs each have some 4 million
_spelled: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_NAMED: Final = "token_id:"
_BLANK: Final = b" \t\r\n"  # white space in JSON


@dataclass(slots=True)
class ToolCall:
    """A tool call, kept as a list of pieces: appending each to a string would copy the string each time."""

    id: Any = None
    name: list[str] = field(default_factory=list[str])
    arguments: list[str] = field(default_factory=list[str])
    given: Any = None
    """Arguments given as an object (Messages)."""


@dataclass(slots=True)
class Choice:
    """One of the n replies."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tool_calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])
    finish_reason: str | None = None
    text_without_ids: bool = False
    """Whether text without token ids was received since the last token ids."""
    other_tokens: bool = False
    """Whether log-probs are labelled with other token ids than those of the reply."""
    versions: Any = None
    """Weights versions, as the server gave them (engines.versions_of)."""
    experts: Any = None
    """Experts of the tokens, as the server gave them (engines.experts_of)."""

    def logprobs_defect(self) -> str | None:
        """Return the defect of the log-probs; None if there is one finite log-prob, of 0 at most, for each token."""
        if not self.logprobs:
            return "no_logprobs"
        if len(self.logprobs) != len(self.token_ids):
            return "logprobs_length"
        if not all(map(math.isfinite, self.logprobs)):
            return "logprobs_not_finite"
        if self.other_tokens:
            return "logprobs_other_tokens"
        return "logprobs_above_zero" if max(self.logprobs) > MAX_LOGPROB else None


@dataclass(slots=True)
class Reply:
    """The answer as received so far."""

    id: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    """Which server or configuration answered (`system_fingerprint`), where it says so."""
    prompt_token_ids: list[int] | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    input_tokens: int | None = None
    """Those of a cache included."""
    cache_read_tokens: int | None = None
    """Prompt tokens that the server had in its cache."""
    cache_creation_tokens: int | None = None
    """Prompt tokens that it wrote to its cache (Anthropic)."""
    output_tokens: int | None = None
    error: str | None = None
    bad_ids: bool = False
    """Whether invalid token ids were received: not an integer, negative, or beyond 31 bits."""
    too_many_ids: bool = False
    """Whether more than MAX_IDS were received; those beyond are dropped."""
    sampled: int = 0
    """Number of tokens with ids or log-probs."""
    several_prompts: bool = False
    """Whether the choices have different prompts."""
    mixed_choices: bool = False
    """Whether choices cannot be told apart; they are merged into one."""
    ids_missing: bool = False
    """Whether text without token ids was received between token ids of the same choice."""
    raw_messages: bool = False
    """Whether the token ids are those of vLLM's raw messages (dialects/responses.py)."""
    unreadable: bool = False
    """Whether an event of the stream has data that cannot be read."""
    ended: bool = False
    """Whether the last event of the stream was received; events after it are not recorded."""

    def unfinished(self) -> str | None:
        """Return why a choice is not whole; None if all are."""
        if self.unreadable:
            return "upstream_unreadable"
        for choice in self.choices.values():
            if (why := UNFINISHED.get(choice.finish_reason or "queued")) is not None:
                return why
        return None if self.choices else UNFINISHED["queued"]

    def choice(self, index: Any = 0) -> Choice:
        """Return the choice of that number; beyond MAX_CHOICES set an error and return one that is discarded."""
        number = integer(index) or 0
        choice = self.choices.get(number)
        if choice is None:
            choice = Choice()
            if len(self.choices) < MAX_CHOICES:
                self.choices[number] = choice
            else:
                self.error = self.error or f"the model server answered with more than {MAX_CHOICES} choices"
        return choice

    def head(self, payload: Json, usage_names: tuple[str, str]) -> None:
        """Take id, model, fingerprint, prompt token ids, usage and error, which all dialects share."""
        if not self.id or not self.model:
            self.id = self.id or string(payload.get("id"))
            self.model = self.model or string(payload.get("model"))
        if (fingerprint := payload.get("system_fingerprint")) is not None:
            self.fingerprint = string(fingerprint)
        self.prompt(payload)
        usage = payload.get("usage")
        if isinstance(usage, dict):
            self._usage(cast("Json", usage), usage_names)
        if payload.get("error") is not None:
            error = payload["error"]
            self.error = str(cast("Json", error).get("message", error) if isinstance(error, dict) else error)

    def _usage(self, usage: Json, names: tuple[str, str]) -> None:
        given, made = (integer(usage.get(name)) for name in names)
        read = integer(object_of(usage.get(f"{names[0]}_details")).get("cached_tokens"))
        if read is not None:
            self.cache_read_tokens = read
        elif given is not None and "cache_read_input_tokens" in usage:  # Anthropic counts them apart from the others
            read, written = (integer(usage.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
            self.cache_read_tokens, self.cache_creation_tokens = read, written
            given += (read or 0) + (written or 0)
        self.input_tokens = given if given is not None else self.input_tokens
        self.output_tokens = made if made is not None else self.output_tokens

    def prompt(self, part: Json) -> None:
        """Take the prompt's token ids, if `part` has them."""
        given = part.get("prompt_token_ids")
        if not given:
            return
        if self.prompt_token_ids is None:
            self.prompt_token_ids = self.ids(given) or None
        elif given != self.prompt_token_ids:
            self.several_prompts = True

    def tokens(self, choice: Choice, part: Json) -> None:
        """Take token ids and log-probs of a choice, if `part` has them."""
        ids, given = self.ids(part.get("token_ids") or part.get("response_token_ids")), part.get("logprobs")
        logprobs = logprobs_of(given)
        if not ids and not logprobs:
            return
        self.sampled += max(len(ids), len(logprobs))
        if self.sampled > MAX_IDS:
            self.too_many_ids = True
            return
        if len(ids) == len(logprobs) and len(choice.token_ids) == len(choice.logprobs):
            choice.other_tokens |= _names_others(given, ids)
        self.ids_missing |= bool(ids) and choice.text_without_ids
        choice.text_without_ids &= not ids
        choice.token_ids += ids
        choice.logprobs += logprobs

    def ids(self, value: Any) -> list[int]:
        """Return `value` as token ids; empty, with a flag set, if any is invalid or there are more than MAX_IDS."""
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
    """Splits a byte stream into server-sent events. Works on bytes, because a piece may end inside a character."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece; return the completed events, with the blank lines that end them. Each byte is scanned once."""
        if not self._rest and piece.endswith(b"\n\n") and piece.find(b"\n\n") == len(piece) - 2 and b"\r" not in piece:
            return [piece]  # the usual case: one event at a time
        looked_at = max(0, len(self._rest) - 2)  # where a blank line may have begun
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
        """Return the bytes after the last complete event."""
        return bytes(self._rest)


def payload_of(event: bytes) -> Json | None:
    """Parse the JSON object in a server-sent event; None for comments, [DONE], other data, and if `is_crowded_event`."""
    at = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
    if not at and event[:5] != b"data:":
        return None
    payload = parse_object(event[at + 5 :])  # usually all of it is data
    return payload if payload is not None or _has_many_lines(event) else parse_object(data_of(event))


def _has_many_lines(event: bytes) -> bool:
    return len(event) > MAX_EVENT_LINES and event.count(b"\n") + event.count(b"\r") > MAX_EVENT_LINES


def is_crowded_event(event: bytes) -> bool:
    """Return whether an event is too long, or has too many lines or values, to be parsed."""
    return len(event) > MAX_EVENT_BYTES or _has_many_lines(event) or is_crowded(event)


def data_of(event: bytes) -> bytes:
    """Return the data of an event, of all its lines; empty for comments."""
    return b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()


def with_payload(event: bytes, payload: Json) -> bytes:
    """Replace the payload of an event; its other lines are kept, in front."""
    data = b"data: " + encoded(payload) + b"\n\n"
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return data  # the usual case: no other lines
    return b"".join([line + b"\n" for line in event.splitlines() if line and not line.startswith(b"data:")]) + data


def with_fields(raw: bytes, payload: Json, fields: Json) -> bytes:
    """Set fields of the JSON object `raw`, whose parsed form is `payload`; other bytes stay unchanged wherever that is safe.

    So a long conversation is not serialised again with every call, and its spelling is kept.
    """
    if not fields:
        return raw
    text = raw.strip(_BLANK)
    if text[:1] != b"{" or b"\0" in text[:4] or not payload:  # not UTF-8, or empty
        return json.dumps(payload | fields).encode()
    missing = {name: value for name, value in fields.items() if name not in payload}
    for name in fields.keys() - missing.keys():
        key = json.dumps(name).encode()
        places = list(_scalar_of(key).finditer(text)) if text.count(key) == 1 else []
        if len(places) != 1 or (b"\\u00" in text and _depth(text[: places[0].start()]) != 1):
            return json.dumps(payload | fields).encode()  # the name occurs twice, has escapes, or holds an object
        start, end = places[0].span(1)
        text = text[:start] + json.dumps(fields[name]).encode() + text[end:]
    return text[:-1] + b"," + encoded(missing)[1:] if missing else text


_IN_STRING: Final = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # possessive: backtracking state takes 120 bytes for each character
_STRING: Final = re.compile(b'"' + _IN_STRING + b'"', re.DOTALL)


def _depth(beginning: bytes) -> int:
    """Return the nesting depth at the end of the beginning of a JSON text."""
    bare = _STRING.sub(b"", beginning)
    return bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")


@cache
def _scalar_of(key: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?<!\\)" + re.escape(key) + rb'\s*:\s*("' + _IN_STRING + rb'"|[-+.\w]+)(?=\s*[,}])', re.DOTALL)


def dense(value: Any) -> str:
    """Encode a value as compact JSON."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except ValueError:  # unpaired surrogates, or nested too deep for it
        return _spelled(value)


def encoded(payload: Json) -> bytes:
    """Encode as compact JSON; escape non-ASCII characters if it has unpaired surrogates."""
    try:
        return to_json(payload, inf_nan_mode="constants")
    except ValueError:
        return json.dumps(payload, separators=(",", ":")).encode()


def is_crowded(text: bytes) -> bool:
    """Return whether a JSON text has too many values to be parsed."""
    return (len(text) > MAX_BRACKETS and text.count(b"{") + text.count(b"[") > MAX_BRACKETS) or (
        len(text) > MAX_COMMAS and text.count(b",") > MAX_COMMAS
    )


def parse_object(text: bytes) -> Json | None:
    """Parse `text` as a JSON object; None if it is not one, or `is_crowded`."""
    if is_crowded(text):
        return None
    try:
        payload = from_json(text)
    except ValueError:
        try:
            payload = json.loads(text)  # accepts what from_json rejects: other encodings, unpaired surrogates, deep nesting
        except (ValueError, RecursionError):
            return None
    return cast("Json", payload) if isinstance(payload, dict) else None


def logprobs_of(value: Any) -> list[float]:
    """Return the log-probs in a choice's `logprobs` (chat or completions form); NaN for what is not a number."""
    if not isinstance(value, dict):
        return []
    held = cast("Json", value)
    content: Any = held.get("content")
    try:
        numbers: list[Any] = [item["logprob"] for item in content] if content else held.get("token_logprobs") or []
        return [number if type(number) is float else float(number) if type(number) is int else math.nan for number in numbers]
    except (TypeError, KeyError, OverflowError):
        return [math.nan]


def _names_others(value: Any, ids: list[int]) -> bool:
    """Whether a choice's `logprobs` name other tokens than `ids`; vLLM names all by their ids if `return_tokens_as_token_ids` is set."""
    held = object_of(value)
    named: Any = held.get("content") or held.get("tokens")
    if not isinstance(named, list) or not named or not _name_of(named[0]).startswith(_NAMED):
        return False
    return any(_name_of(item) != f"{_NAMED}{token}" for item, token in zip(cast("list[Any]", named), ids, strict=False))


def _name_of(item: Any) -> str:
    name = cast("Json", item).get("token") if isinstance(item, dict) else item
    return name if isinstance(name, str) else ""


def object_of(value: Any) -> Json:
    """Return a JSON object; an empty one for anything else."""
    return cast("Json", value) if isinstance(value, dict) else {}


def dicts(value: Any) -> list[Json]:
    """Return the JSON objects in a list; empty if it is not a list."""
    return cast("list[Json]", [item for item in value if isinstance(item, dict)]) if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def string(value: Any) -> str | None:
    """Return `value` if it is a string, with unpaired surrogates replaced; else None."""
    if not isinstance(value, str):
        return None
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def integer(value: Any) -> int | None:
    """Return `value` if it is a 64-bit integer and not a bool; else None."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None
