"""A LangChain callback handler that records agent names of LangChain and LangGraph runs, for `agent_match`."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from opentelemetry import trace

from agl_otel.errors import SettingsError

AGENT_NAME: Final = "agent.name"
TRACER: Final = "agl_otel.compat.tracer.langchain"


def agent_names_handler() -> Any:
    """Make a callback handler that records each named chain as a span with `agent.name`. Raises SettingsError without LangChain."""
    try:
        from langchain_core.callbacks import BaseCallbackHandler  # pyright: ignore[reportMissingImports]  # installed by the user
    except ModuleNotFoundError as error:
        raise SettingsError("get_langchain_handler() needs LangChain: pip install langchain-core") from error
    base: Any = BaseCallbackHandler
    return type("AgentNames", (_AgentNames, base), {})()


class _AgentNames:
    run_inline = True  # in the thread and context of the run, so that model calls become children of the agent's span

    def __init__(self) -> None:
        self._spans: dict[UUID, trace.Span] = {}

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        name = kwargs.get("name") or (serialized or {}).get("name") or "chain"
        parent = self._spans.get(parent_run_id) if parent_run_id is not None else None
        context = trace.set_span_in_context(parent) if parent is not None else None
        span = trace.get_tracer(TRACER).start_span(f"langchain.Chain.{name}", context, attributes={AGENT_NAME: str(name)})
        self._spans[run_id] = span

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        if (span := self._spans.pop(run_id, None)) is not None:
            span.end()

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if (span := self._spans.pop(run_id, None)) is not None:
            span.record_exception(error)
            span.end()
