"""Names of attributes and spans: the values of the named queries' parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from agl_otel.spans.operations import OPERATION, WORKFLOW
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions

AGENT_NAME: Final = "gen_ai.agent.name"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
NAMES: Final[Mapping[str, str]] = {
    "process": conventions.PROCESS,
    "seal": conventions.SPAN_SEAL,
    "attempt": conventions.SPAN_ATTEMPT,
    "annotation": conventions.SPAN_ANNOTATION,
    "llm": conventions.SPAN_LLM,
    "call": conventions.LLM_CALL,
    "choice": conventions.LLM_CHOICE,
    "prefix_call": conventions.LLM_PREFIX_CALL,
    "prefix_choice": conventions.LLM_PREFIX_CHOICE,
    "model_version": conventions.LLM_MODEL_VERSION,
    "weight_versions": conventions.LLM_WEIGHT_VERSIONS,
    "experts": conventions.LLM_ROUTED_EXPERTS,
    "bridge": conventions.LLM_BRIDGE,
    "incomplete": conventions.LLM_INCOMPLETE,
    "http_status": "http.response.status_code",
    "retry_of": conventions.LLM_RETRY_OF,
    "arm": conventions.LLM_ARM,
    "served_arm": conventions.SERVED_ARM,
    "canary_failed": conventions.LLM_CANARY_FAILED,
    "canary_full": conventions.LLM_CANARY_FULL,
    "finish": "gen_ai.response.finish_reasons",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "sampling": conventions.LLM_SAMPLING,
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "seal_spans": conventions.SEAL_SPANS,
    "seal_dropped": conventions.SEAL_DROPPED,
    "seal_closing": conventions.SEAL_CLOSING,
    "late": conventions.LATE,
    "caller": conventions.LLM_CALLER,
    "hooked": conventions.ATTEMPT_HOOKED,
    "given": conventions.REWARD_GIVEN,
    "feedback_id": conventions.FEEDBACK_ID,
    "reward_source": conventions.reward_source_key(0),
    "source": conventions.FEEDBACK_SOURCE,
    "rubric_name": conventions.FEEDBACK_RUBRIC,
    "judge_event": conventions.JUDGE_EVENT,
    "judge_call": conventions.JUDGE_CALL,
    "judge_prompt_tokens": conventions.JUDGE_PROMPT_TOKENS,
    "judge_answer_tokens": conventions.JUDGE_ANSWER_TOKENS,
    "judge_ended": conventions.JUDGE_ENDED,
    "reward": conventions.reward_value_key(0),
    "reward_label": conventions.reward_label_key(0),
    "reward_name": conventions.reward_name_key(0),
    "reward_time": conventions.reward_time_key(0),
    "agent": AGENT_NAME,
    "own_agent": "agent.name",
    "task": "execute_task ",
    "node": "traceloop.association.properties.langgraph_node",
    "integration": "traceloop.association.properties.ls_integration",
    "instructions": "gen_ai.system_instructions",
    "asked": "gen_ai.input.messages",
    "answered": OUTPUT_MESSAGES,
    "tools": "gen_ai.tool.definitions",
    "messages_call": conventions.LLM_MESSAGES_CALL,
    "messages_before": conventions.LLM_MESSAGES_BEFORE,
    "tools_call": conventions.LLM_TOOLS_CALL,
    "model": "gen_ai.request.model",
    "response": conventions.RESPONSE_ID,
    "tool": "gen_ai.tool.name",
    "operation": OPERATION,
    "operation_name": conventions.OPERATION_NAME,
    "workflow": "gen_ai.workflow.name",
    "workflow_span": WORKFLOW,
}
"""{parameter: attribute or span name}."""


def names_in(query: str, names: Mapping[str, str] = NAMES) -> dict[str, str]:
    """Return those of `names` that a named query has as parameters."""
    return {parameter: names[parameter] for parameter in _text_parameters(query) if parameter in names}


@cache
def _text_parameters(query: str) -> tuple[str, ...]:
    return tuple(set(re.findall(r"\{(\w+):String\}", named_query(query))))
