"""litellm's spans, also those of Agent Lightning 0.3's LLMProxy: `litellm_request`, and `raw_gen_ai_request` with the provider's bodies."""

from __future__ import annotations

from typing import Any

from agl_otel.spans.dialects.dialect import Content, Conversation, Dialect, loads
from agl_otel.spans.dialects.shapes import from_flat, from_parts, of_bodies
from agl_otel.types import SpanLike

_VLLM = "llm.hosted_vllm"


def read(span: SpanLike) -> Conversation:
    """Prompt, reply and tools."""
    attributes = span.attributes or {}
    if span.name != "raw_gen_ai_request":  # newer releases write the conventions' JSON (seen in 1.83)
        return from_parts(span) if "gen_ai.input.messages" in attributes else from_flat(span)
    asked: dict[str, Any] = {name: loads(str(attributes.get(f"{_VLLM}.{name}", "[]"))) for name in ("messages", "tools")}
    return of_bodies(asked, {"choices": loads(str(attributes.get(f"{_VLLM}.choices", "[]")))})


DIALECT = Dialect(
    name="litellm",
    written_by="litellm's OpenTelemetry callback, Agent Lightning 0.3's LLMProxy",
    call=({"span.name": ("litellm_request",)}, {"span.name": ("raw_gen_ai_request",)}),
    read=read,
    response_id=(("gen_ai.response.id",), (f"{_VLLM}.id",)),
    prompt_token_ids=((f"{_VLLM}.prompt_token_ids",), ("prompt_token_ids",)),
    response_token_ids=((f"{_VLLM}.response_token_ids",), (f"{_VLLM}.choices", 0, "token_ids"), ("response_token_ids",)),
    logprobs=((f"{_VLLM}.choices", 0, "logprobs", "content"), ("logprobs.content",)),
    content=(Content(f"{_VLLM}.messages", "list"), Content(f"{_VLLM}.choices", "list", reply=True)),
)
