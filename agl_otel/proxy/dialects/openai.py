"""OpenAI's chat/completions, completions and embeddings, as vLLM and SGLang speak them too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agl_otel.proxy.dialects.dialect import SAMPLING, Dialect
from agl_otel.proxy.engines import VERSIONS, take_answer, take_choice
from agl_otel.proxy.parts import chat_message, text_part
from agl_otel.proxy.reply import Choice, Json, Reply, ToolCall, dicts, integer, string

TOKEN_IDS: Final = "return_token_ids"
OUTPUT_IDS: Final = "return_output_ids_in_sglext"
_USAGE: Final = ("prompt_tokens", "completion_tokens")
_TEXT: Final = frozenset({"content", "refusal"})
_REASONING: Final = frozenset({"reasoning_content", "reasoning"})


def take(reply: Reply, payload: Json) -> None:
    """Add an answer, or a chunk of one, to the reply; its choices have `message`, `delta` or `text`."""
    reply.head(payload, _USAGE)
    items = dicts(payload.get("choices"))
    if len(items) > 1:
        reply.mixed_choices |= len({integer(item.get("index")) or 0 for item in items}) < len(items)
    for item in items:
        choice = reply.choice(item.get("index"))
        if choice.finish_reason and (item.get("token_ids") or (choice.token_ids and item.get("finish_reason"))):
            reply.mixed_choices = True  # the choice was finished: this is another one's
        reply.prompt(item)
        reply.tokens(choice, item)
        if "weight_versions" in item or "routed_experts" in item or "meta_info" in item:
            take_choice(choice, item)
        if finish_reason := string(item.get("finish_reason")):
            choice.finish_reason = finish_reason
        message = item.get("message") or item.get("delta")
        has_text = _take_content(choice, item, cast("Json", message) if isinstance(message, dict) else {})
        choice.text_without_ids |= has_text and bool(choice.token_ids) and not (item.get("token_ids") or item.get("response_token_ids"))
    if "metadata" in payload or "sglext" in payload:
        take_answer(reply, payload)


def _take_content(choice: Choice, item: Json, message: Json) -> bool:
    """Add what a choice has of text and tool calls; return whether it has any."""
    has_text = False
    if isinstance(text := item.get("text"), str):
        choice.text.append(text)
        has_text = bool(text)
    for name, text in message.items():
        if isinstance(text, str) and ((is_text := name in _TEXT) or name in _REASONING):
            (choice.text if is_text else choice.reasoning).append(text)
            has_text |= bool(text)
    for place, piece in enumerate(dicts(message.get("tool_calls"))):
        has_text = True
        index = integer(piece.get("index"))
        call = choice.tool_calls.setdefault(place if index is None else index, ToolCall())
        call.id = piece.get("id") or call.id
        function = piece.get("function")
        if isinstance(function, dict):
            named = cast("Json", function)
            call.name.append(string(named.get("name")) or "")
            call.arguments.append(string(named.get("arguments")) or "")
    return has_text


def _messages(body: Mapping[str, Any]) -> list[Json]:
    return dicts(body.get("messages"))


def _prompt(body: Mapping[str, Any]) -> list[Any]:
    return [body.get("prompt")]


def _several_prompts(body: Mapping[str, Any]) -> bool:
    """Whether the prompt is a list of texts, or of lists of token ids; a list of token ids is one prompt."""
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


_BOTH: Final = frozenset(
    {
        *("frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n", "presence_penalty", "seed", "stop", "stream"),
        *("stream_options", "temperature", "top_p", "user"),
    }
)
"""Fields of chat/completions and of completions."""
_CHAT: Final = frozenset(
    {
        *("audio", "function_call", "functions", "max_completion_tokens", "messages", "modalities", "moderation"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
        *("response_format", "safety_identifier", "service_tier", "store", "thinking", "tool_choice", "tools", "top_logprobs", "verbosity"),
        "web_search_options",
    }
)
HELLO: Final[list[Json]] = [{"role": "user", "content": "Hi"}]
CHAT: Final = Dialect(
    "chat/completions",
    "chat",
    _BOTH | _CHAT | SAMPLING,
    {TOKEN_IDS: True, "logprobs": True},
    take,
    _messages,
    chat_message,
    engine_extras={VERSIONS: True},
    stream_extras={"return_input_ids_in_sglext": True, OUTPUT_IDS: True, "logprobs": True},
    smallest_request={"messages": HELLO, "max_tokens": 1},
)
COMPLETIONS: Final = Dialect(
    "completions",
    "text_completion",
    _BOTH | {"best_of", "echo", "prompt", "suffix"} | SAMPLING,
    {TOKEN_IDS: True, "logprobs": 0},
    take,
    _prompt,
    _text,
    engine_extras={VERSIONS: True},
    smallest_request={"prompt": "Hi", "max_tokens": 1},
    several_prompts=_several_prompts,
)
EMBEDDINGS: Final = Dialect(
    "embeddings",
    "embeddings",
    frozenset({"dimensions", "encoding_format", "input", "model", "user"}),
    {},
    _usage,
    _input,
    _text,
    sampling={},
    samples=False,
)
