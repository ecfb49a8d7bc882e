"""Flat `gen_ai.prompt.{i}.…` and `gen_ai.completion.{i}.…`: OpenLLMetry before 0.50, AgentOps, and Agent Lightning 0.3 by AgentOps.

0.3 added `prompt_token_ids`, `response_token_ids` and `logprobs.content`, which are the defaults of every dialect.
"""

from __future__ import annotations

from agl_otel.spans.dialects.dialect import ANY, Content, Dialect
from agl_otel.spans.dialects.shapes import from_flat

DIALECT = Dialect(
    name="openllmetry_flat",
    written_by="OpenLLMetry before 0.50, AgentOps, Agent Lightning 0.3's AgentOpsTracer",
    call=(
        {"llm.request.type": ("chat", "completion")},
        {"agentops.span.kind": ("llm",)},
        {"span.name": ("openai.chat", "openai.completion", "openai.chat.completion")},  # where messages are not captured
        {"gen_ai.prompt.": ANY},
        {"gen_ai.completion.": ANY},
    ),
    read=from_flat,
    content=(
        Content("gen_ai.prompt.", "numbered"),
        Content("gen_ai.completion.", "numbered", "assistant", reply=True),
        Content("gen_ai.task.input"),
        Content("gen_ai.task.output"),
        Content("traceloop.entity.input"),
        Content("traceloop.entity.output"),
        Content("tool.parameters", role="assistant"),
        Content("tool.result", role="tool"),
        Content("logprobs.content", "logprobs", "assistant", reply=True),
    ),
)
