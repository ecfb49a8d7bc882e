"""Where what people, models and tools said stands on spans and log records, in every dialect: what masking must know. Pure.

It is wider than what adapters read: frameworks repeat whole conversations on the spans of their agents. A test masks every recording
and looks for what is left; a library that writes otherwise is one more line here. Definitions of tools are no messages.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from agl_otel_hook import conventions

Shape = Literal["messages", "numbered", "parts", "list", "body", "logprobs", "text"]
"""`messages`: a JSON list of them; `numbered`: flat keys KEY{i}.field. The others are not told apart: `parts` of a message, a `list` or
a `body` in JSON, tokens with `logprobs`, any `text`."""


class Said(NamedTuple):
    """One attribute, or all that begin so."""

    key: str
    """With a dot at its end: every key that begins so."""
    shape: Shape = "text"
    role: str = ""
    """Whose words; empty where they say it themselves, or where nobody can tell."""
    reply: bool = False
    """Whether the model wrote it in this call."""


SAID: Final = (
    # OpenTelemetry's conventions, and who follows them
    Said("gen_ai.input.messages", "messages"),
    Said("gen_ai.output.messages", "messages", "assistant", reply=True),
    Said("gen_ai.system_instructions", "parts", "system"),
    Said("gen_ai.tool.call.arguments", role="assistant"),
    Said("gen_ai.tool.call.result", role="tool"),
    Said("gen_ai.tool.message", role="tool"),
    # OpenLLMetry, AgentOps, LangSmith
    Said("gen_ai.prompt.", "numbered"),
    Said("gen_ai.completion.", "numbered", "assistant", reply=True),
    Said("gen_ai.prompt", "body"),
    Said("gen_ai.completion", "body", reply=True),
    Said("gen_ai.task.input"),
    Said("gen_ai.task.output"),
    Said("traceloop.entity.input"),
    Said("traceloop.entity.output"),
    Said("tool.parameters", role="assistant"),
    Said("tool.result", role="tool"),
    # OpenInference
    Said("llm.input_messages.", "numbered"),
    Said("llm.output_messages.", "numbered", "assistant", reply=True),
    Said("llm.prompts"),
    Said("input.value"),
    Said("output.value", reply=True),
    # pydantic-ai and logfire
    Said("pydantic_ai.all_messages", "messages"),
    Said("all_messages_events"),
    Said("final_result", role="assistant"),
    Said("tool_arguments", role="assistant"),
    Said("tool_response", role="tool"),
    Said("model_request_parameters", role="system"),
    Said("request_data"),
    Said("response_data", reply=True),
    # Vercel
    Said("ai.prompt"),
    Said("ai.prompt.messages", "messages"),
    *(Said(f"ai.response.{what}", role="assistant", reply=True) for what in ("text", "object", "reasoning")),
    Said("ai.response.toolCalls", "list", "assistant", reply=True),
    Said("ai.toolCall.args", role="assistant"),
    Said("ai.toolCall.result", role="tool"),
    # Agent Lightning 0.3: operations, litellm's spans, and what an agent emits
    Said(conventions.OPERATION_INPUT, "body"),
    Said(f"{conventions.OPERATION_INPUT}."),
    Said(conventions.OPERATION_OUTPUT, "body", reply=True),
    Said(f"{conventions.OPERATION_OUTPUT}.", reply=True),
    Said("llm.hosted_vllm.messages", "list"),
    Said("llm.hosted_vllm.choices", "list", reply=True),
    Said("logprobs.content", "logprobs", "assistant", reply=True),
    Said(conventions.MESSAGE_BODY),
    Said(conventions.OBJECT_LITERAL),
    Said(conventions.OBJECT_JSON),
)
KEPT: Final = frozenset({"role", "id", "tool_call_id", "finish_reason", "index", "type", "model", "name", "event.name", "gen_ai.system"})
"""Last parts of keys that say who and which, and not what."""
_EXACT: Final = {said.key: said for said in SAID if not said.key.endswith(".")}
_BEGIN: Final = tuple(said for said in SAID if said.key.endswith("."))
MARKS: Final = tuple(sorted({said.key.split(".")[0].encode() for said in SAID}))
"""A request without any of these holds nothing of SAID, and no token ids."""


def said_at(key: str) -> Said | None:
    """What the table says of an attribute; None where it holds no words, or none to be masked."""
    if (exact := _EXACT.get(key)) is not None:
        return exact
    found = next((said for said in _BEGIN if key.startswith(said.key)), None)
    if found is not None and found.shape == "text" and (key.rpartition(".")[2] in KEPT or "token_ids" in key):
        return None
    return found
