from __future__ import annotations

from typing import Any

import pytest

from agl_otel.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceTree
from agl_otel.errors import UsageError
from agl_otel.types import Span
from agl_otel_hook import conventions


def span(name: str, number: int, start: float, end: float, parent: int | None = None, **attributes: Any) -> Span:
    held = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span.from_attributes(
        attributes=held, rollout_id="ro-1", attempt_id="at-1", sequence_id=number, name=name, trace_id="a" * 32,
        span_id=f"{number:016x}", parent_id=None if parent is None else f"{parent:016x}", start_time=start, end_time=end,
    )  # fmt: skip


def reward(number: int, at: float, value: float, parent: int | None = None) -> Span:
    made = span(conventions.SPAN_ANNOTATION, number, at, at, parent)
    made.attributes[conventions.reward_value_key(0)] = value
    return made


def call(number: int, start: float, end: float, parent: int, **attributes: Any) -> Span:
    return span("openai.chat", number, start, end, parent, **attributes)


def test_each_call_gets_the_reward_that_follows_it() -> None:
    spans = [
        span("root", 1, 0, 10),
        call(2, 1, 2, 1, prompt_token_ids=[1, 2], response_token_ids=[3], gen_ai__response__id="a"),
        reward(3, 2.5, 0.25, 1),
        call(4, 3, 4, 1, prompt_token_ids=[1, 2, 3], response_token_ids=[4], gen_ai__response__id="b"),
        reward(5, 5, 1.0, 1),
    ]
    first, second = TracerTraceToTriplet().adapt(spans)
    assert (first.prompt["token_ids"], first.response["token_ids"], first.reward) == ([1, 2], [3], 0.25)
    assert (second.reward, second.metadata["response_id"], second.metadata["agent_name"]) == (1.0, "b", "*")


def test_only_calls_of_matching_agents_are_taken() -> None:
    spans = [
        span("root", 1, 0, 10),
        span("writer", 2, 1, 4, 1, agent__name="write"),
        call(3, 2, 3, 2),
        span("checker", 4, 5, 8, 1, agent__name="check"),
        call(5, 6, 7, 4),
    ]
    [only] = TracerTraceToTriplet(agent_match="write", repair_hierarchy=False).adapt(spans)
    assert only.metadata["agent_name"] == "write"
    assert len(TracerTraceToTriplet(agent_match="write|check", repair_hierarchy=False).adapt(spans)) == 2


def test_a_judges_call_below_a_reward_is_left_out() -> None:
    judged = reward(2, 1, 0.5, 1)
    judged.end_time = 3
    spans = [span("root", 1, 0, 10), judged, call(3, 1.5, 2, 2)]
    assert TracerTraceToTriplet(repair_hierarchy=False).adapt(spans) == []
    assert len(TracerTraceToTriplet(repair_hierarchy=False, exclude_llm_call_in_reward=False).adapt(spans)) == 1


def test_a_call_also_recorded_by_the_proxy_counts_once_and_has_its_tokens() -> None:
    recorded = span(conventions.SPAN_LLM, 3, 1.2, 1.8, 2, gen_ai__response__id="a")
    recorded.attributes |= {conventions.LLM_CALL: 1, conventions.LLM_PROMPT_TOKEN_IDS: [7, 8], conventions.LLM_RESPONSE_TOKEN_IDS: [9]}
    [only] = TracerTraceToTriplet().adapt([span("root", 1, 0, 3), call(2, 1, 2, 1, gen_ai__response__id="a"), recorded])
    assert (only.prompt["token_ids"], only.response["token_ids"]) == ([7, 8], [9])


def test_the_proxys_prefix_form_is_expanded() -> None:
    first = span(conventions.SPAN_LLM, 1, 0, 1)
    first.attributes |= {conventions.LLM_CALL: 1, conventions.LLM_PROMPT_TOKEN_IDS: [1, 2], conventions.LLM_RESPONSE_TOKEN_IDS: [3]}
    second = span(conventions.SPAN_LLM, 2, 1, 2)
    second.attributes |= {conventions.LLM_CALL: 2, conventions.LLM_PREFIX_CALL: 1, conventions.LLM_PREFIX_CHOICE: 0}
    second.attributes |= {conventions.LLM_PROMPT_TOKEN_IDS: [4], conventions.LLM_RESPONSE_TOKEN_IDS: [5]}
    one, two = LlmProxyTraceToTriplet().adapt([first, second, reward(3, 3, 1.0)])
    assert (one.prompt["token_ids"], one.reward) == ([1, 2], None)
    assert (two.prompt["token_ids"], two.response["token_ids"], two.reward) == ([1, 2, 3, 4], [5], 1.0)


def test_litellms_spans_are_read_in_the_order_of_their_numbers() -> None:
    late = span("raw_gen_ai_request", 5, 0, 1, llm__hosted_vllm__prompt_token_ids="[1]", llm__hosted_vllm__response_token_ids="[[2]]")
    early = span("litellm_request", 2, 9, 9, prompt_token_ids=[3], response_token_ids=[4])
    assert [t.prompt["token_ids"] for t in LlmProxyTraceToTriplet().adapt([late, early, reward(3, 0, 0.5)])] == [[3], [1]]


def test_spans_under_the_root_are_moved_by_time_to_their_parents() -> None:
    spans = [span("root", 1, 0, 10), span("agent", 2, 1, 9, 1, agent__name="write"), call(3, 2, 3, 1), call(4, 9.5, 9.8, 1)]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    [agent, other] = tree.children
    assert [child.span.name for child in agent.children] == ["openai.chat"] and other.span.span_id == f"{4:016x}"


def test_missing_spans_and_cycles_are_reported_as_errors() -> None:
    with pytest.raises(UsageError, match="no spans"):
        TracerTraceToTriplet().adapt([])
    with pytest.raises(UsageError, match="circle"):
        TracerTraceToTriplet().adapt([span("a", 1, 0, 1, 2), span("b", 2, 0, 1, 1)])
