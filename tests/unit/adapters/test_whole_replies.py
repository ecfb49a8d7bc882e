"""Forms made from spans hold only complete replies, as token forms do, and count the others; from the proxy and from instrumentations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from agl_otel.adapters import TracerTraceToTriplet, TraceToMessages
from agl_otel.adapters.records import DEMONSTRATIONS, FORMS, TOKEN_FORMS, Reading, Rows, rows_of
from agl_otel.types import Span, TraceStatus
from agl_otel_hook import conventions
from tests.unit.adapters.spans import call, proxy_call, reward, span

SPAN_FORMS = sorted(FORMS.keys() - TOKEN_FORMS - {"openai_dpo", DEMONSTRATIONS})
NO_REPLY: dict[str, Any] = {
    "gen_ai.output.messages": "",
    conventions.LLM_RESPONSE_TOKEN_IDS: [],
    conventions.LLM_PROMPT_TOKEN_IDS: [],
}
FLAT_WITHOUT_REPLY: dict[str, Any] = {
    "gen_ai.completion.0.role": None,
    "gen_ai.completion.0.content": None,
    "response_token_ids": [],
}


def failed(found: Span) -> Span:
    """Return the span with an error status."""
    return found.model_copy(update={"status": TraceStatus(status_code="ERROR", description="it failed")})


def without_nones(found: Span) -> Span:
    return found.model_copy(update={"attributes": {key: value for key, value in found.attributes.items() if value is not None}})


def streamed(finish_reason: str) -> Span:
    """A streamed call as written by OpenLLMetry; without a finish reason, one whose stream the agent closed (status OK)."""
    reply = [{"role": "assistant", "parts": [{"type": "text", "content": "o"}], "finish_reason": finish_reason}]
    asked = [{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]
    more = {"gen_ai.response.finish_reasons": [finish_reason]} if finish_reason else {}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.is_streaming": True,
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps(reply),
        "gen_ai.response.id": "id-s",
        **more,
    }
    return span("s", 1, 2, name="openai.chat", **attributes)


def read(form: str, traces: Any, row: Any, spans: Sequence[Span]) -> Rows:
    return rows_of(Reading(form=form), traces.build(row()), [*spans, reward("r", 9, 1.0)])


CUT_OFF = {
    "the proxy: the client closed the stream": ([proxy_call("a", 1, 2, **{conventions.LLM_INCOMPLETE: "client_gone"})], "incomplete_reply"),
    "the proxy: timed out without a reply": (
        [failed(proxy_call("a", 1, 2, **NO_REPLY, **{conventions.LLM_INCOMPLETE: "upstream_timeout"}))],
        "incomplete_reply",
    ),
    "the proxy: HTTP 400": ([failed(proxy_call("a", 1, 2, **NO_REPLY))], "no_reply"),
    "the proxy, cut off and then masked": (
        [failed(proxy_call("a", 1, 2, **{conventions.LLM_INCOMPLETE: conventions.LLM_MASKED}))],
        "incomplete_reply",
    ),
    "both doors: the agent's span looks whole": (
        [call("o", 1, 4), proxy_call("a", 2, 3, "o", **{conventions.LLM_INCOMPLETE: "client_gone", "gen_ai.response.id": "id-o"})],
        "incomplete_reply",
    ),
    "an instrumentation: an error": ([failed(call("a", 1, 2))], "incomplete_reply"),
    "an instrumentation: no reply": ([without_nones(call("a", 1, 2, **FLAT_WITHOUT_REPLY))], "no_reply"),
    "an instrumentation: the stream was closed": ([streamed("")], "incomplete_reply"),
}


@pytest.mark.parametrize("form", SPAN_FORMS)
@pytest.mark.parametrize("what", CUT_OFF)
def test_a_call_without_a_whole_reply_is_no_row_and_counted(what: str, form: str, traces: Any, row: Any) -> None:
    spans, why = CUT_OFF[what]
    second: dict[str, Any] = {conventions.LLM_CALL: 2}
    whole = proxy_call("w", 5, 6, **second)
    assert len(read(form, traces, row, [whole]).rows) == 1
    found = read(form, traces, row, [*spans, whole])
    assert (len(found.rows), dict(found.refused)) == (1, {why: 1})


@pytest.mark.parametrize("form", [*SPAN_FORMS, "transitions"])
def test_a_try_that_an_sdk_repeated_is_counted_in_every_form(form: str, traces: Any, row: Any) -> None:
    again: dict[str, Any] = {conventions.LLM_CALL: 2, conventions.LLM_RETRY_OF: 1}
    spans = [proxy_call("a", 1, 2), proxy_call("b", 3, 4, **again), reward("r", 9, 1.0)]
    found = rows_of(Reading(form=form), traces.build(row(incomplete="retried"), row(call=2)), spans)
    assert (len(found.rows), dict(found.refused)) == (1, {"incomplete_reply": 1})


@pytest.mark.parametrize("form", SPAN_FORMS)
def test_a_whole_reply_is_a_row_from_the_proxy_and_from_instrumentations(form: str, traces: Any, row: Any) -> None:
    """A client's error after a whole reply does not invalidate the tokens that the proxy recorded."""
    both = [failed(call("o", 1, 4)), proxy_call("a", 2, 3, "o", **{"gen_ai.response.id": "id-o"})]
    for spans in ([proxy_call("a", 1, 2)], [call("a", 1, 2)], [streamed("stop")], both):
        found = read(form, traces, row, spans)
        assert (len(found.rows), dict(found.refused)) == (1, {})


@pytest.mark.parametrize("form", ["messages", "openai"])
def test_messages_that_cannot_be_read_are_counted(form: str, traces: Any, row: Any) -> None:
    found = read(form, traces, row, [span("x", 1, 2, **{"gen_ai.operation.name": "chat", "gen_ai.input.messages": "{no json"})])
    assert (found.rows, dict(found.refused)) == ([], {"unreadable_messages": 1})


def test_the_adapters_return_every_call_as_in_03() -> None:
    spans = [proxy_call("a", 1, 2, **{conventions.LLM_INCOMPLETE: "client_gone"})]
    assert len(TraceToMessages().adapt(spans)) == len(TracerTraceToTriplet().adapt(spans)) == 1
