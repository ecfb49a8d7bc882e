"""The Vercel AI SDK (Node): `ai.*`. Only the inner spans, one for each request to the model, are calls."""

from __future__ import annotations

from typing import Any

from agl_otel.spans.dialects.dialect import Content, Conversation, Dialect, Message, as_text, loads
from agl_otel.spans.dialects.shapes import PARTS, openai_call, openai_tool
from agl_otel.types import SpanLike

OPERATIONS = tuple(
    f"ai.{what}.{how}" for what in ("generateText", "generateObject", "streamText", "streamObject") for how in ("doGenerate", "doStream")
)


def read(span: SpanLike) -> Conversation:
    """Prompt, reply and tools."""
    attributes = span.attributes or {}
    asked: Any = loads(str(attributes.get("ai.prompt.messages", "[]")))
    prompt = [message for entry in asked for message in _messages(entry)]
    text = attributes.get("ai.response.text") or attributes.get("ai.response.object") or ""
    called: Any = loads(str(attributes.get("ai.response.toolCalls", "[]")))
    reply: Message = {"role": "assistant", "content": text}
    if called:
        reply["content"] = text or None
        reply["tool_calls"] = [openai_call(c.get("toolCallId"), c.get("toolName"), c.get("input", c.get("args"))) for c in called]
    tools = [openai_tool(tool) for tool in attributes.get("ai.prompt.tools") or ()]
    return Conversation(prompt, [reply] if text or called else [], tools or None)


def _messages(entry: Any) -> list[Message]:
    """Convert an entry to one message, or to one for each tool answer in it."""
    content = entry.get("content", "")
    if isinstance(content, str):
        return [{"role": entry["role"], "content": content}]
    if entry["role"] == "tool":
        return [{"role": "tool", "tool_call_id": part.get("toolCallId"), "content": _output(part)} for part in content]
    calls = [part for part in content if part.get("type") == "tool-call"]
    rest = [part for part in content if part.get("type") not in ("tool-call", "reasoning")]
    made = [PARTS.get(str(part.get("type")), PARTS["text"])(part) for part in rest]
    texts = all(part["type"] == "text" for part in made)
    message: Message = {"role": entry["role"], "content": "".join(part["text"] for part in made) if texts else made}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [openai_call(c.get("toolCallId"), c.get("toolName"), c.get("input", c.get("args"))) for c in calls]
    return [message]


def _output(part: Any) -> str:
    output = part.get("output", part.get("result"))
    return as_text(output["value"] if isinstance(output, dict) and "value" in output else output)


DIALECT = Dialect(
    name="vercel",
    written_by="the Vercel AI SDK (ai 5 and 6)",
    call=({"ai.operationId": OPERATIONS}, {"operation.name": OPERATIONS}, {"span.name": OPERATIONS}),
    read=read,
    model=(("ai.response.model",), ("ai.model.id",)),
    response_id=(("ai.response.id",), ("gen_ai.response.id",)),
    input_tokens=(("ai.usage.inputTokens",), ("ai.usage.promptTokens",), ("gen_ai.usage.input_tokens",)),
    output_tokens=(("ai.usage.outputTokens",), ("ai.usage.completionTokens",), ("gen_ai.usage.output_tokens",)),
    request=("ai.settings", "gen_ai.request"),
    response=("ai.response", "gen_ai.response"),
    content=(
        Content("ai.prompt"),
        Content("ai.prompt.messages", "messages"),
        *(Content(f"ai.response.{what}", role="assistant", reply=True) for what in ("text", "object", "reasoning")),
        Content("ai.response.toolCalls", "list", "assistant", reply=True),
        Content("ai.toolCall.args", role="assistant"),
        Content("ai.toolCall.result", role="tool"),
    ),
)
