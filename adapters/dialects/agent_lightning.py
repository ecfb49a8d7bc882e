"""What Agent Lightning 0.3 stored besides AgentOps' spans: Weave's calls as operations, and litellm's spans of its proxy."""

from __future__ import annotations

from typing import Any

from agl_otel.adapters.dialects.readers import from_bodies, from_flat, from_parts, of_bodies
from agl_otel.adapters.dialects.table import ANY, Conversation, Dialect, loads
from agl_otel.types import SpanLike
from agl_otel_hook import conventions

_IN, _OUT = conventions.OPERATION_INPUT, conventions.OPERATION_OUTPUT
_VLLM = "llm.hosted_vllm"

WEAVE = Dialect(
    name="agent_lightning_weave",
    written_by="Agent Lightning 0.3's WeaveTracer",
    call=(
        {"span.name": ("openai.chat.completions.create",)},
        {f"{_IN}.model": ANY, f"{_OUT}.id": ANY},
    ),
    read=from_bodies(_IN, _OUT),
    model=((f"{_OUT}.model",), (f"{_IN}.model",)),
    response_id=((f"{_OUT}.id",), ("gen_ai.response.id",)),
    input_tokens=((f"{_OUT}.usage.prompt_tokens",),),
    output_tokens=((f"{_OUT}.usage.completion_tokens",),),
    prompt_token_ids=((f"{_OUT}.prompt_token_ids",), ("prompt_token_ids",)),
    response_token_ids=(
        (f"{_OUT}.response_token_ids.0",),
        (f"{_OUT}.response_token_ids",),
        (f"{_OUT}.choices.0.token_ids",),
        (f"{_OUT}.choices.0.provider_specific_fields.token_ids",),
        ("response_token_ids",),
    ),
    request=(_IN,),
    response=(_OUT,),
)


def _of_litellm(span: SpanLike) -> Conversation:
    attributes = span.attributes or {}
    if span.name != "raw_gen_ai_request":  # newer releases write the conventions' JSON (seen in 1.83)
        return from_parts(span) if "gen_ai.input.messages" in attributes else from_flat(span)
    asked: dict[str, Any] = {name: loads(str(attributes.get(f"{_VLLM}.{name}", "[]"))) for name in ("messages", "tools")}
    return of_bodies(asked, {"choices": loads(str(attributes.get(f"{_VLLM}.choices", "[]")))})


LITELLM = Dialect(
    name="litellm",
    written_by="litellm's OpenTelemetry callback, Agent Lightning 0.3's LLMProxy",
    call=({"span.name": ("litellm_request",)}, {"span.name": ("raw_gen_ai_request",)}),
    read=_of_litellm,
    response_id=(("gen_ai.response.id",), (f"{_VLLM}.id",)),
    prompt_token_ids=((f"{_VLLM}.prompt_token_ids",), ("prompt_token_ids",)),
    response_token_ids=((f"{_VLLM}.response_token_ids",), (f"{_VLLM}.choices", 0, "token_ids"), ("response_token_ids",)),
    logprobs=((f"{_VLLM}.choices", 0, "logprobs", "content"), ("logprobs.content",)),
)
