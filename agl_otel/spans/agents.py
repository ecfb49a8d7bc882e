"""Find the agent's name on a span: a table of marks, one for each framework. Pure.

The name does not depend on the dialect of a call, because agents have their own spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from agl_otel.spans.operations import WORKFLOW
from agl_otel.types import SpanLike
from agl_otel_hook import conventions


class Mark(NamedTuple):
    """`key` holds the agent's name on a span where `where` holds: {key: value}; the key `span.name` means: starts with."""

    framework: str
    key: str
    where: Mapping[str, str] = {}


_TASK: Final = "traceloop.association.properties"
AGENTS: Final = (
    Mark("Agent Lightning 0.3, OpenInference", "agent.name"),
    Mark("AgentOps", "operation.name", {"agentops.span.kind": "agent"}),
    Mark("AutoGen", "recipient_agent_type"),
    Mark("LangGraph under AgentOps", "langchain.chain.type"),
    Mark("Microsoft Agent Framework", "executor.id"),
    Mark("Weave", f"{conventions.OPERATION_INPUT}.name", {"type": "agent"}),
    Mark("LangChain under AgentOps", "lc_name", {"span.name": "langchain.Chain."}),
    Mark("OpenTelemetry's conventions", "gen_ai.agent.name"),
    Mark("OpenTelemetry's conventions until genai 0.1", "gen_ai.workflow.name", {"span.name": WORKFLOW}),
    Mark("OpenLLMetry", "traceloop.entity.name", {"traceloop.span.kind": "agent"}),
    Mark("LangGraph under OpenLLMetry", f"{_TASK}.langgraph_node", {"span.name": "execute_task ", f"{_TASK}.ls_integration": "langgraph"}),
    Mark("Vercel AI SDK", "ai.telemetry.functionId"),
)
"""The first match names the agent. The order of the first seven is Agent Lightning 0.3's. A LangGraph task is one of the graph's
own nodes; those inside of create_agent are the agent's (`langchain_create_agent` in ls_integration)."""


def agent_name(span: SpanLike) -> str | None:
    """Return the name of the agent that `span` represents; None if it names none."""
    attributes: Mapping[str, Any] = span.attributes or {}
    for mark in AGENTS:
        name = attributes.get(mark.key)
        if name and all(_holds(span.name, attributes, key, value) for key, value in mark.where.items()):
            return str(name)
    return None


def _holds(name: str, attributes: Mapping[str, Any], key: str, value: str) -> bool:
    return name.startswith(value) if key == "span.name" else attributes.get(key) == value
