"""A model call is one node although both the agent's telemetry and the proxy record it."""

from __future__ import annotations

from typing import Any

from agl_otel.traces.figures import OutlineSpan, joined


def span(span_id: str, parent: str = "", **given: Any) -> OutlineSpan:
    texts = dict.fromkeys(
        ("service", "status", "message", "process", "model", "response_id", "model_version", "agent", "tool", "incomplete"), ""
    )
    numbers = dict.fromkeys(("sequence_id", "call", "choice", "prompt_tokens", "response_tokens", "events"), 0)
    held: dict[str, Any] = {
        **texts, **numbers, "attempt_id": "at-1", "trace_id": "t1", "span_id": span_id, "parent_id": parent, "name": span_id,
        "kind": "Internal", "start_nano": "0", "duration_nano": "0", "is_call": False, "rewards": {}, "sampling": [], **given,
    }  # fmt: skip
    return OutlineSpan(**held)


def call(span_id: str, parent: str, response_id: str, **given: Any) -> OutlineSpan:
    return span(span_id, parent, is_call=True, model="m", response_id=response_id, kind="Client", **given)


def within(*spans: OutlineSpan) -> dict[str, str]:
    return {each.span_id: each.within for each in joined(spans) if each.within}


def test_a_call_is_one_with_the_agents_span_around_it() -> None:
    chat, http = span("chat", "root", model="m"), span("POST", "chat", kind="Client")
    assert within(span("root"), chat, http, call("proxy", "POST", "r1")) == {"proxy": "chat"}


def test_a_call_is_one_with_the_span_of_the_same_response_id() -> None:
    assert within(span("chat", model="m", response_id="r1"), call("proxy", "", "r1", trace_id="t2")) == {"proxy": "chat"}


def test_of_an_sdks_tries_the_one_with_the_used_answer_counts() -> None:
    chat = span("chat", model="m", response_id="r2")
    assert within(chat, call("first", "chat", "", call=1), call("second", "chat", "r2", call=2)) == {"second": "chat"}


def test_a_span_around_several_calls_or_an_agent_is_not_a_call() -> None:
    several = [call("a", "loop", "r1", call=1), call("b", "loop", "r2", call=2)]
    assert within(span("loop", model="m"), *several) == {}
    assert within(span("invoke_agent x", model="m"), call("proxy", "invoke_agent x", "r1")) == {}
    assert within(span("plan", model="m", operation="plan"), call("proxy", "plan", "r1")) == {}
    assert within(span("kb", model="embedder", operation="retrieval"), call("proxy", "kb", "r1")) == {}
    assert within(span("chat", model="m", response_id="other"), call("proxy", "chat", "r1")) == {}


def test_a_client_span_with_an_operation_is_not_one_of_http() -> None:
    memory = span("search_memory", "chat", kind="Client", operation="search_memory")
    assert within(span("chat", model="m"), memory, call("proxy", "search_memory", "r1")) == {}


def test_further_choices_are_nodes_of_their_own() -> None:
    assert within(span("chat", model="m", response_id="r1"), call("p0", "chat", "r1"), call("p1", "chat", "r1", choice=1)) == {"p0": "chat"}


def test_cycles_of_parents_terminate() -> None:
    assert within(span("a", "b", kind="Client"), span("b", "a", kind="Client"), call("proxy", "a", "r1")) == {}
