"""Operations of OpenTelemetry's conventions for generative AI that enclose model calls or stand beside them, and are none. Pure."""

from __future__ import annotations

from typing import Final

OPERATION: Final = "gen_ai.operation.name"
WORKFLOW: Final = "invoke_workflow"
"""The operation, and by the conventions the first word of its span's name."""
AGENTS: Final = frozenset({"create_agent", "invoke_agent", WORKFLOW, "plan"})
TOOL_LIKE: Final = frozenset(
    {"retrieval", "create_memory", "search_memory", "update_memory", "upsert_memory", "delete_memory"}
    | {"create_memory_store", "delete_memory_store"}
)
_NO_CALLS: Final = AGENTS | TOOL_LIKE | {"execute_tool"}
_AGENT_SPANS: Final = ("create_agent", "invoke_agent", WORKFLOW)


def is_agent(operation: str, span_name: str) -> bool:
    """Whether it is a span of an agent, a workflow or a plan: by its operation, else by its name."""
    return operation in AGENTS or (not operation and span_name.startswith(_AGENT_SPANS))


def is_no_call(operation: str, span_name: str) -> bool:
    """Whether it is known not to be a model call, although such spans may name a model."""
    return operation in _NO_CALLS or is_agent(operation, span_name)
