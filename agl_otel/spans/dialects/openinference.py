"""OpenInference (Arize Phoenix): `llm.input_messages.{i}.message.…`; the whole response, token ids too, is JSON in `output.value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_otel.spans.dialects.dialect import Content, Conversation, Dialect, Message
from agl_otel.spans.dialects.shapes import OTHER_MEDIA, nested_list, openai_call, openai_tool
from agl_otel.types import SpanLike


def read(span: SpanLike) -> Conversation:
    """Prompt, reply and tools."""
    attributes = span.attributes or {}
    prompt = [_message(entry["message"]) for entry in nested_list(attributes, "llm.input_messages")]
    reply = [_message({"role": "assistant", **entry["message"]}) for entry in nested_list(attributes, "llm.output_messages")]
    tools = [openai_tool(entry["tool"]["json_schema"]) for entry in nested_list(attributes, "llm.tools")]
    return Conversation(prompt, reply, tools or None)


def _message(fields: Mapping[str, Any]) -> Message:
    parts = [_part(entry["message_content"]) for entry in fields.get("contents") or ()]
    message: Message = {"role": fields["role"], "content": parts or fields.get("content", "")}
    if "tool_call_id" in fields:
        message["tool_call_id"] = fields["tool_call_id"]
    if calls := fields.get("tool_calls"):
        functions = [(call["tool_call"], call["tool_call"].get("function") or {}) for call in calls]
        message["tool_calls"] = [openai_call(call.get("id"), f.get("name"), f.get("arguments")) for call, f in functions]
        message["content"] = message["content"] or None
    return message


def _part(content: Mapping[str, Any]) -> Message:
    if content.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": content["image"]["image"]["url"]}}
    if content.get("type") in OTHER_MEDIA:
        return {**content}
    return {"type": "text", "text": content.get("text", "")}


DIALECT = Dialect(
    name="openinference",
    written_by="openinference-instrumentation-openai, -openai-agents, -langchain and others",
    call=({"openinference.span.kind": ("LLM",)},),
    read=read,
    model=(("llm.model_name",),),
    response_id=(("output.value", "id"),),
    input_tokens=(("llm.token_count.prompt",),),
    output_tokens=(("llm.token_count.completion",),),
    prompt_token_ids=(("output.value", "prompt_token_ids"), ("output.value", "choices", 0, "prompt_token_ids")),
    response_token_ids=(("output.value", "choices", 0, "token_ids"), ("output.value", "response_token_ids")),
    logprobs=(("output.value", "choices", 0, "logprobs", "content"),),
    request=("llm.invocation_parameters",),
    response=(),
    content=(
        Content("llm.input_messages.", "numbered"),
        Content("llm.output_messages.", "numbered", "assistant", reply=True),
        Content("llm.prompts"),
        Content("input.value"),
        Content("output.value", reply=True),
    ),
)
