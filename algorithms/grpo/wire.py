"""Parse requests and format responses of OpenAI's chat completions API, and of completions that score a prompt. Pure: no model, no server.

vLLM's `return_token_ids` is supported, too: the response then has `prompt_token_ids`, and each choice `token_ids`. `stop` is as in vLLM:
the text ends before the stop string, while the token ids and log-probs include the token that completed it. An unsupported field that
would change the reply is an error that names it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.algorithms.grpo.generate import Row, Sampling, stop_place
from agl_otel.algorithms.grpo.tools import for_template, read_calls
from agl_otel.algorithms.options import MOST_TEMPERATURE
from agl_otel.errors import UsageError

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
IGNORED: Final = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning_effort"),
        *("return_weight_versions", "safety_identifier", "service_tier", "store", "stream_options", "user"),
    }
)
"""Fields that do not affect the reply."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
"""{unsupported field: the values with no effect, which are accepted}."""


@dataclass(frozen=True)
class ChatRequest:
    """A validated request."""

    messages: list[dict[str, Any]]
    model: str
    n: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    max_tokens: int | None
    """None: the server's limit."""
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    prompt_token_ids: list[int]
    """The prompt in place of the messages; empty: they are rendered."""
    tools: list[dict[str, Any]]
    """Empty where `tool_choice` is `none`, too."""

    def sampling(self, limit: int) -> Sampling:
        """Return the sampling parameters, with at most `limit` tokens."""
        return Sampling(min(self.max_tokens or limit, limit), self.temperature, self.top_p, self.stop)


def parse(body: Any) -> ChatRequest:
    """Validate the JSON body of a chat completion request. Raises UsageError that names the field and its valid values."""
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    fields: dict[str, Any] = {name: value for name, value in body.items() if name not in IGNORED}
    for name, neutral in NEUTRAL.items():
        if fields.pop(name, None) not in neutral:
            raise UsageError(f"{name} is not supported by this server")
    messages = [_message(place, message) for place, message in enumerate(_take(fields, "messages", list, []))]
    if not messages:
        raise UsageError("messages must be a list of at least one message")
    options: dict[str, Any] = body.get("stream_options") or {}
    max_tokens = [_number(fields, name, None, 1, 1 << 31, int) for name in ("max_completion_tokens", "max_tokens")]
    request = ChatRequest(
        messages=messages,
        model=_take(fields, "model", str, ""),
        n=_number(fields, "n", 1, 1, MAX_CHOICES, int),
        temperature=_number(fields, "temperature", 1.0, 0, MOST_TEMPERATURE, float),
        top_p=_number(fields, "top_p", 1.0, 1e-6, 1, float),
        stop=_stop(fields.pop("stop", None)),
        max_tokens=next((value for value in max_tokens if value is not None), None),
        seed=_number(fields, "seed", None, -(1 << 63), 1 << 63, int),
        stream=_take(fields, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        logprobs=_take(fields, "logprobs", bool, False),
        top_logprobs=_number(fields, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS, int),
        return_token_ids=_take(fields, "return_token_ids", bool, False),
        prompt_token_ids=_ids(_take(fields, "prompt_token_ids", list, [])),
        tools=_tools(_take(fields, "tools", list, []), body.get("tool_choice")),
    )
    if fields:
        raise UsageError(f"unknown fields: {', '.join(sorted(fields))}")
    return request


def parse_scoring(body: Any) -> list[int]:
    """Return the token ids that a request of the completions API asks the log-probs of. Raises UsageError if it asks for something else."""
    wanted = {"echo": (True,), "max_tokens": (0,), "logprobs": (0, 1), "temperature": (None, 1), "n": (None, 1), "stream": (None, False)}
    given: dict[str, Any] = dict(body) if isinstance(body, dict) else {}
    prompt = given.pop("prompt", None)
    if not isinstance(prompt, list) or not prompt or any(given.pop(name, None) not in values for name, values in wanted.items()):
        raise UsageError(
            'this server completes chats; its /v1/completions only scores a prompt: {"prompt": [token ids], "echo": true, "max_tokens": 0, '
            '"logprobs": 1, "temperature": 1}'
        )
    if unknown := sorted(given.keys() - {"model"}):
        raise UsageError(f"unknown fields: {', '.join(unknown)}")
    return _ids(prompt, "prompt")


def scored(token_ids: Sequence[int], logprobs: Sequence[float], model: str, decode: Callable[..., str]) -> dict[str, Any]:
    """Return the response to a request of `parse_scoring`; `logprobs`: of all tokens but the first. No alternatives are named."""
    texts = [decode([token], skip_special_tokens=False) for token in token_ids]
    of_tokens = {"tokens": texts, "token_logprobs": [None, *logprobs], "top_logprobs": None, "text_offset": None}
    choice = {"index": 0, "text": decode(list(token_ids), skip_special_tokens=False), "finish_reason": "length", "logprobs": of_tokens}
    usage = {"prompt_tokens": len(token_ids), "completion_tokens": 0, "total_tokens": len(token_ids)}
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": [choice], "usage": usage}


def _ids(given: list[Any], name: str = "prompt_token_ids") -> list[int]:
    if not all(type(each) is int and each >= 0 for each in given):
        raise UsageError(f"{name} must be a list of token ids")
    return given


def _take(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    return default if value is None else value


def _number(fields: dict[str, Any], name: str, default: Any, low: float, high: float, kind: type) -> Any:
    value = fields.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value or not low <= value <= high:
        raise UsageError(f"{name} must be {'an integer' if kind is int else 'a number'} from {low} to {high}, not {value!r}")
    return kind(value)


def _stop(given: Any) -> tuple[str, ...]:
    stop: Any = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise UsageError("stop must be a string or a list of strings, none of them empty")
    return tuple(stop)


def _tools(tools: list[Any], choice: Any) -> list[dict[str, Any]]:
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise UsageError(f'tools[{place}] must be {{"type": "function", "function": {{…}}}}')
    return [] if choice == "none" else tools


def _message(place: int, message: Any) -> dict[str, Any]:
    """Join the text parts of a message's content into one string."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UsageError(f"messages[{place}] must be an object with a role")
    content: Any = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = content
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise UsageError(f"messages[{place}].content: only text parts are supported")
        content = "".join(str(part["text"]) for part in parts)
    if content is not None and not isinstance(content, str):
        raise UsageError(f"messages[{place}].content must be a string or a list of text parts")
    return for_template({**message, "content": content or ""})


class Reply:
    """Formats the response to one request, as one body or in chunks; `decode` turns token ids into text, without special tokens."""

    def __init__(self, request: ChatRequest, rows: list[Row], model: str, decode: Any) -> None:
        self.request = request
        self.rows = rows
        self.decode = decode
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._envelope = {"id": self.id, "created": int(time.time()), "model": model}
        self._sent = [(0, "") for _ in rows]
        self._held_back = max(map(len, request.stop), default=1) - 1
        """Number of characters that may be the beginning of a stop string, and are not streamed yet."""

    def whole(self) -> dict[str, Any]:
        """Format the body of a response without streaming."""
        messages = [self._content(row, index, self._text(row.tokens)) for index, row in enumerate(self.rows)]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **messages[index]},
                "finish_reason": "tool_calls" if "tool_calls" in messages[index] else row.finish_reason,
                "logprobs": self._logprobs(row, 0) if self.request.logprobs else None,
                **({"token_ids": row.tokens} if self.request.return_token_ids else {}),
            }
            for index, row in enumerate(self.rows)
        ]
        body = {**self._envelope, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        return {**body, "prompt_token_ids": self.rows[0].prompt} if self.request.return_token_ids else body

    def first_chunk(self) -> dict[str, Any]:
        """Format the first chunk of a stream, which opens every choice."""
        choices = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
            for i in range(len(self.rows))
        ]
        chunk = self._chunk(choices)
        return {**chunk, "prompt_token_ids": self.rows[0].prompt} if self.request.return_token_ids else chunk

    def next_chunks(self, tokens: list[int]) -> list[dict[str, Any]]:
        """Format a chunk for each choice with new text since the last call; `tokens[i]` is the number of choice i's tokens so far."""
        chunks: list[dict[str, Any]] = []
        for index, (row, ready) in enumerate(zip(self.rows, tokens, strict=True)):
            sent, text = self._sent[index]
            if ready <= sent:
                continue
            done = row.finish_reason is not None and ready == len(row.tokens)
            now = self._text(row.tokens[:ready])
            if now.endswith("\ufffd") and not done:
                continue  # an incomplete character: wait for the token that completes it
            if not done:
                now = now[: max(len(text), len(now) - self._held_back)]
            delta = {"content": now[len(text) :]}
            if self.request.tools:  # tool calls can be parsed only at the end
                delta = self._content(row, index, now) if done else {"content": ""}
            finish = "tool_calls" if "tool_calls" in delta else row.finish_reason
            choice = {
                "index": index,
                "delta": delta,
                "finish_reason": finish if done else None,
                "logprobs": self._logprobs(row, sent, ready) if self.request.logprobs else None,
                **({"token_ids": row.tokens[sent:ready]} if self.request.return_token_ids else {}),
            }
            self._sent[index] = (ready, now)
            chunks.append(self._chunk([choice]))
        return chunks

    def _text(self, tokens: list[int]) -> str:
        """Return the text of these tokens, up to a stop string."""
        text = self.decode(tokens)
        return text[: stop_place(text, self.request.stop)]

    def _content(self, row: Row, index: int, text: str) -> dict[str, Any]:
        """Return `content`, and `tool_calls` where the request has tools and the reply calls some."""
        content, calls = read_calls(text, f"call-{self.id[-12:]}-{index}") if self.request.tools else (text, [])
        numbered = [{"index": place, **call} for place, call in enumerate(calls)] if self.request.stream else calls
        return {"content": content, "tool_calls": numbered} if calls else {"content": content}

    def last_chunk(self) -> dict[str, Any] | None:
        """Format the chunk with the usage; None where it was not requested."""
        return {**self._chunk([]), "usage": self._usage()} if self.request.include_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "object": "chat.completion.chunk", "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.rows[0].prompt), sum(len(row.tokens) for row in self.rows)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, row: Row, start: int, end: int | None = None) -> dict[str, Any]:
        tokens, logprobs = row.tokens[start:end], row.logprobs[start:end]
        top = row.top[start:end] or [[] for _ in tokens]
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in best]}
            for token, logprob, best in zip(tokens, logprobs, top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def server_sent_event(data: dict[str, Any] | str) -> bytes:
    """Encode one server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n".encode()
