"""LangSmith over OpenTelemetry: the bodies of request and response, as JSON, in `gen_ai.prompt` and `gen_ai.completion`."""

from __future__ import annotations

from typing import Any

from agl_otel.spans.dialects.dialect import Content, Conversation, Dialect, Message, loads
from agl_otel.spans.dialects.shapes import from_bodies
from agl_otel.types import SpanLike

_bodies = from_bodies("gen_ai.prompt", "gen_ai.completion")
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def read(span: SpanLike) -> Conversation:
    """Read OpenAI's bodies, or LangChain's serialised messages and generations if LangChain made the call."""
    asked: Any = loads(str((span.attributes or {}).get("gen_ai.prompt", "{}")))
    messages = asked.get("messages") if isinstance(asked, dict) else None
    if not messages or not isinstance(messages[0], list):
        return _bodies(span)
    answered: Any = loads(str((span.attributes or {}).get("gen_ai.completion", "{}")))
    generations = [entry["message"] for row in answered.get("generations") or [] for entry in row]
    return Conversation([_langchain(entry) for entry in messages[0]], [_langchain(entry) for entry in generations], None)


def _langchain(entry: Any) -> Message:
    fields = entry.get("kwargs") or entry
    message: Message = {"role": _ROLES.get(fields.get("type"), "user"), "content": fields.get("content") or ""}
    return {**message, **({"tool_call_id": fields["tool_call_id"]} if fields.get("tool_call_id") else {})}


DIALECT = Dialect(
    name="langsmith",
    written_by="langsmith[otel]: wrap_openai and LangChain",
    call=({"langsmith.span.kind": ("llm",)},),
    read=read,
    prompt_token_ids=(("gen_ai.completion", "prompt_token_ids"), ("gen_ai.completion", "choices", 0, "prompt_token_ids")),
    response_token_ids=(("gen_ai.completion", "choices", 0, "token_ids"),),
    logprobs=(("gen_ai.completion", "choices", 0, "logprobs", "content"),),
    content=(Content("gen_ai.prompt", "body"), Content("gen_ai.completion", "body", reply=True)),
)
