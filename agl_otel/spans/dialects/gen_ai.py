"""OpenTelemetry's conventions for generative AI from 1.37 on: messages are JSON attributes (of the span, or of one event: log_records.py).

OpenLLMetry writes them since 0.50, and so do openai-agents under it and most newer libraries.
"""

from __future__ import annotations

from agl_otel.spans.dialects.dialect import ABSENT, ANY, Content, Dialect
from agl_otel.spans.dialects.shapes import from_parts

OPERATIONS = ("chat", "text_completion", "generate_content")

DIALECT = Dialect(
    name="gen_ai",
    written_by="OpenTelemetry 1.37+, OpenLLMetry 0.50+, openai-agents, pydantic-ai 2, most newer libraries",
    call=(
        {"gen_ai.operation.name": OPERATIONS, "gen_ai.input.messages": ANY},
        {"gen_ai.operation.name": OPERATIONS, "gen_ai.output.messages": ANY},
        {"gen_ai.operation.name": (ABSENT,), "gen_ai.input.messages": ANY},
        {"gen_ai.operation.name": (ABSENT,), "gen_ai.output.messages": ANY},
    ),
    read=from_parts,
    content=(
        Content("gen_ai.input.messages", "messages"),
        Content("gen_ai.output.messages", "messages", "assistant", reply=True),
        Content("gen_ai.system_instructions", "parts", "system"),
        Content("gen_ai.tool.definitions", "list"),
        Content("gen_ai.tool.call.arguments", role="assistant"),
        Content("gen_ai.tool.call.result", role="tool"),
        Content("gen_ai.tool.message", role="tool"),
        Content("gen_ai.retrieval.query.text"),
        Content("gen_ai.retrieval.documents", role="tool"),
        Content("gen_ai.memory.query.text"),
        Content("gen_ai.memory.records"),
        Content("gen_ai.evaluation.explanation"),
    ),
)
