"""Translate answers of chat/completions, whole and streamed, to those of generateContent. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agl_otel.proxy.dialects.openai import take
from agl_otel.proxy.reply import Choice, Json, Reply, dicts, encoded, integer, object_of, parse_object
from agl_otel.spans.tolerant import json_of

_FINISH: Final = {"stop": "STOP", "tool_calls": "STOP", "function_call": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error(status: int, body: bytes) -> Json:
    """Return the error of an answer in Google's form."""
    given = (parse_object(body) or {}).get("error")
    held = object_of(given).get("message", given)
    message = held if isinstance(held, str) else body.decode(errors="replace")
    return {"error": {"code": status, "message": message, "status": _STATUS.get(status, "INTERNAL")}}


def count(tokenized: bytes) -> Json | None:
    """Return the answer to countTokens by a body of /tokenize; None if that counts nothing."""
    found = integer((parse_object(tokenized) or {}).get("count"))
    return None if found is None else {"totalTokens": found}


def whole(payload: Json) -> Json:
    """Return a whole answer."""
    reply = Reply()
    take(reply, payload)
    return _answer(reply, [_ended(index, choice) for index, choice in sorted(reply.choices.items())], payload)


def _answer(reply: Reply, candidates: list[Json], payload: Json) -> Json:
    usage = _usage(payload.get("usage"))
    held = {"modelVersion": reply.model, "responseId": reply.id}
    return {"candidates": candidates, **({"usageMetadata": usage} if usage else {}), **{k: v for k, v in held.items() if v is not None}}


def _candidate(index: int, parts: list[Json], **more: Any) -> Json:
    return {"content": {"role": "model", "parts": parts}, "index": index, **more}


def _ended(index: int, choice: Choice) -> Json:
    """Return the end of a candidate: texts that were not sent yet, its calls, and why it ended.

    Arguments that are no JSON object cannot be sent; Google answers such a reply as a malformed function call, too.
    """
    parts, malformed = _texts(choice), ""
    for call in choice.tool_calls.values():
        name, text = "".join(call.name), "".join(call.arguments)
        arguments = _arguments(text)
        if arguments is None:
            malformed = malformed or f"{name}({text})"
        else:
            parts.append({"functionCall": {**({"id": call.id} if isinstance(call.id, str) else {}), "name": name, "args": arguments}})
    if malformed:
        return _candidate(index, parts, finishReason="MALFORMED_FUNCTION_CALL", finishMessage=f"Malformed function call: {malformed}")
    return _candidate(index, parts, finishReason=_FINISH.get(choice.finish_reason or "", "OTHER"))


def _texts(choice: Choice) -> list[Json]:
    thought, text = "".join(choice.reasoning), "".join(choice.text)
    return [*([{"text": thought, "thought": True}] if thought else []), *([{"text": text}] if text else [])]


def _arguments(text: str) -> Json | None:
    """Return arguments; None if they are no JSON object. NaN and infinite numbers, which Python's parser takes, are no JSON."""
    try:
        found: Any = json_of(text) if text.strip() else {}
        json.dumps(found, allow_nan=False)
    except ValueError:
        return None
    return cast("Json", found) if isinstance(found, dict) else None


def _usage(usage: Any) -> Json | None:
    if not isinstance(usage, dict):
        return None
    given = cast("Json", usage)
    details, cached = object_of(given.get("completion_tokens_details")), object_of(given.get("prompt_tokens_details"))
    thoughts, made = integer(details.get("reasoning_tokens")) or 0, integer(given.get("completion_tokens")) or 0
    held = {
        "promptTokenCount": integer(given.get("prompt_tokens")) or 0,
        "candidatesTokenCount": max(0, made - thoughts),
        "totalTokenCount": integer(given.get("total_tokens")) or (integer(given.get("prompt_tokens")) or 0) + made,
    }
    more = {"thoughtsTokenCount": thoughts, "cachedContentTokenCount": integer(cached.get("cached_tokens")) or 0}
    return held | {name: count for name, count in more.items() if count}


@dataclass(slots=True)
class Stream:
    """Translates the chunks of a stream: texts at once, calls and the end of candidates with the last event."""

    _reply: Reply = field(default_factory=Reply)
    _last: Json = field(default_factory=dict[str, Any])
    """The chunk with the usage."""

    def add(self, payload: Json) -> bytes:
        """Return the event for a chunk; empty if it has no text."""
        if payload.get("error") is not None:
            return _event(error(500, encoded(payload)))
        take(self._reply, payload)
        if object_of(payload.get("usage")):
            self._last = payload
        candidates: list[Json] = []
        for item in dicts(payload.get("choices")):
            index = integer(item.get("index")) or 0
            choice = self._reply.choice(index)
            if parts := _texts(choice):
                candidates.append(_candidate(index, parts))
            choice.text.clear()
            choice.reasoning.clear()
        return _event(_answer(self._reply, candidates, {})) if candidates else b""

    def end(self) -> bytes:
        """Return the last event; empty if no candidate has ended, or this was called before."""
        ended = [_ended(index, choice) for index, choice in sorted(self._reply.choices.items()) if choice.finish_reason]
        self._reply.choices.clear()
        return _event(_answer(self._reply, ended, self._last)) if ended else b""


def _event(payload: Json) -> bytes:
    return b"data: " + encoded(payload) + b"\r\n\r\n"
