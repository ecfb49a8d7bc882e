"""OpenAI's chat/completions, completions and embeddings, as vLLM and SGLang speak them too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agl_otel.proxy.dialects.dialect import Dialect
from agl_otel.proxy.parts import chat_message, text_part
from agl_otel.proxy.reply import Choice, Json, Reply, dicts, integer, logprobs_of, string

TOKEN_IDS: Final = "return_token_ids"
_USAGE: Final = ("prompt_tokens", "completion_tokens")
_SAID: Final = (("content", "text"), ("refusal", "text"), ("reasoning_content", "reasoning"), ("reasoning", "reasoning"))


def take(reply: Reply, payload: Json) -> None:
    """Choices with `message`, `delta` or `text`."""
    reply.head(payload, _USAGE)
    for item in dicts(payload.get("choices")):
        choice = reply.choice(item.get("index"))
        reply.prompt(item)
        choice.token_ids += reply.ids(item.get("token_ids"))
        choice.logprobs += logprobs_of(item.get("logprobs"))
        choice.finish_reason = string(item.get("finish_reason")) or choice.finish_reason
        if isinstance(item.get("text"), str):
            choice.text.append(item["text"])
        said = item.get("message") or item.get("delta")
        if isinstance(said, dict):
            _say(choice, cast("Json", said))


def _say(choice: Choice, said: Json) -> None:
    for name, kind in _SAID:
        if isinstance(said.get(name), str):
            (choice.text if kind == "text" else choice.reasoning).append(said[name])
    for place, piece in enumerate(dicts(said.get("tool_calls"))):
        index = integer(piece.get("index"))
        call = choice.tool_calls.setdefault(place if index is None else index, {"id": None, "name": "", "arguments": ""})
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function")
        if isinstance(function, dict):
            named = cast("Json", function)
            call["name"] += string(named.get("name")) or ""
            call["arguments"] += string(named.get("arguments")) or ""


def _messages(body: Mapping[str, Any]) -> list[Json]:
    return dicts(body.get("messages"))


def _prompt(body: Mapping[str, Any]) -> list[Any]:
    return [body.get("prompt")]


def _several_prompts(body: Mapping[str, Any]) -> bool:
    """A list of texts, or of lists of token ids; a list of token ids is one prompt."""
    prompt = body.get("prompt")
    return (
        isinstance(prompt, list) and len(cast("list[Any]", prompt)) > 1 and not all(type(each) is int for each in cast("list[Any]", prompt))
    )


def _input(body: Mapping[str, Any]) -> list[Any]:
    return [body.get("input")]


def _text(prompt: Any) -> Json:
    return {"role": "user", "parts": [text_part(prompt)]}


def _usage(reply: Reply, payload: Json) -> None:
    reply.head(payload, _USAGE)


HELLO: Final[list[Json]] = [{"role": "user", "content": "Hi"}]
CHAT: Final = Dialect(
    "chat/completions",
    "chat",
    {TOKEN_IDS: True, "logprobs": True},
    take,
    _messages,
    chat_message,
    {"messages": HELLO, "max_tokens": 1},
)
COMPLETIONS: Final = Dialect(
    "completions",
    "text_completion",
    {TOKEN_IDS: True, "logprobs": 0},
    take,
    _prompt,
    _text,
    {"prompt": "Hi", "max_tokens": 1},
    several_prompts=_several_prompts,
)
EMBEDDINGS: Final = Dialect("embeddings", "embeddings", {}, _usage, _input, _text, sampling={}, samples=False)
