"""An answer, whole or streamed, put together from its JSON payloads. Pure; what is malformed is left out, never an error."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, cast

Json = dict[str, Any]
_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")


@dataclass(slots=True)
class Choice:
    """One of the n replies."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tool_calls: dict[int, Json] = field(default_factory=dict[int, Json])
    finish_reason: str | None = None

    def finite_logprobs(self) -> list[float] | None:
        """The log-probs, where there is a finite one for each token of the reply."""
        fit = len(self.logprobs) == len(self.token_ids) > 0 and all(map(math.isfinite, self.logprobs))
        return self.logprobs if fit else None


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

    def take(self, payload: Json) -> None:
        """Add a whole answer or a chunk of one."""
        self.id = self.id or _str(payload.get("id"))
        self.model = self.model or _str(payload.get("model"))
        self._prompt(payload)
        usage = payload.get("usage")
        if isinstance(usage, dict):
            numbers = cast("Json", usage)
            self.input_tokens, self.output_tokens = _int(numbers.get("prompt_tokens")), _int(numbers.get("completion_tokens"))
        if payload.get("error") is not None:
            error = payload["error"]
            self.error = str(cast("Json", error).get("message", error) if isinstance(error, dict) else error)
        for item in _dicts(payload.get("choices")):
            choice = self.choices.setdefault(_int(item.get("index")) or 0, Choice())
            self._prompt(item)
            choice.token_ids += _ints(item.get("token_ids")) or ()
            choice.logprobs += _logprobs(item.get("logprobs"))
            choice.finish_reason = _str(item.get("finish_reason")) or choice.finish_reason
            if isinstance(item.get("text"), str):
                choice.text.append(item["text"])
            said = item.get("message") or item.get("delta")
            if isinstance(said, dict):
                _say(choice, cast("Json", said))

    def _prompt(self, part: Json) -> None:
        if self.prompt_token_ids is None and part.get("prompt_token_ids"):
            self.prompt_token_ids = _ints(part["prompt_token_ids"])


class Events:
    """Cuts a stream of server-sent events into events, as they arrive in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that are whole by now, with the blank lines that end them."""
        held = self._rest + piece
        events: list[bytes] = []
        at = 0
        for end in _BLANK_LINE.finditer(held):
            events.append(held[at : end.end()])
            at = end.end()
        self._rest = held[at:]
        return events

    def rest(self) -> bytes:
        """What has come after the last whole event."""
        return self._rest


def payload_of(event: bytes) -> Json | None:
    """The JSON object in a server-sent event; None for comments, [DONE] and what is no JSON object."""
    if not event.startswith(b"data:"):
        return None
    return parse_object(event[5:])


def parse_object(text: bytes) -> Json | None:
    """The JSON object that `text` is; None where it is none."""
    try:
        payload = json.loads(text)
    except ValueError:
        return None
    return cast("Json", payload) if isinstance(payload, dict) else None


def _say(choice: Choice, said: Json) -> None:
    for name, parts in (
        ("content", choice.text),
        ("refusal", choice.text),
        ("reasoning_content", choice.reasoning),
        ("reasoning", choice.reasoning),
    ):
        if isinstance(said.get(name), str):
            parts.append(said[name])
    for place, piece in enumerate(_dicts(said.get("tool_calls"))):
        index = _int(piece.get("index"))
        call = choice.tool_calls.setdefault(place if index is None else index, {"id": None, "name": "", "arguments": ""})
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function")
        if isinstance(function, dict):
            named = cast("Json", function)
            call["name"] += _str(named.get("name")) or ""
            call["arguments"] += _str(named.get("arguments")) or ""


def _logprobs(value: Any) -> list[float]:
    if not isinstance(value, dict):
        return []
    held = cast("Json", value)
    content: Any = held.get("content")
    try:
        numbers: list[Any] = [item["logprob"] for item in content] if content else held.get("token_logprobs") or []
    except (TypeError, KeyError):
        return [math.nan]
    return [number if type(number) is float else float(number) if type(number) is int else math.nan for number in numbers]


def _ints(value: Any) -> list[int] | None:
    if isinstance(value, list) and set(map(type, cast("list[Any]", value))) <= {int}:
        return cast("list[int]", value)
    return None


def _dicts(value: Any) -> list[Json]:
    return [cast("Json", item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _int(value: Any) -> int | None:
    return value if type(value) is int else None
