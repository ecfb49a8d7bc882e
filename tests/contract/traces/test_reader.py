"""The reads of algorithms: typed spans, calls as columns, rewards, verdicts, and the digest of a read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agl_otel.errors import QueryError, UnavailableError, UsageError
from agl_otel.settings import free_port, free_ports
from agl_otel.spans.rewards import find_final_reward
from agl_otel.traces import chdb
from agl_otel.traces import clickhouse_server as server_engine
from agl_otel.traces.figures import SETTLED_SECONDS
from agl_otel.traces.names import AGENT_NAME, names_in
from agl_otel.traces.observed import integer
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.sql import named_query
from agl_otel.traces.steps import trace_id_of
from agl_otel.types import Attempt, AttemptLedger, ProcessRecord, Rollout
from agl_otel.types.columns import Traces
from agl_otel_hook import conventions

P = conventions.PROCESS
DEADLINE = 5.0
SLACK = 15.0
"""What a busy machine may take beside the deadline; a wait of its own for each collector and query would take longer."""


def row(number: int, name: str = "work", attributes: dict[str, str] | None = None, **other: Any) -> dict[str, Any]:
    return {
        "Timestamp": f"1750000000.{number:09d}",
        "TraceId": "t",
        "SpanId": f"s{number}",
        "SpanName": name,
        "SpanAttributes": attributes or {},
        "RolloutId": "ro-1",
        "AttemptId": "at-1",
        "SequenceId": number,
        **other,
    }


def call(number: int, call_number: int, *, process: str = "x", **other: Any) -> dict[str, Any]:
    attributes = {P: process, conventions.LLM_CALL: str(call_number), conventions.LLM_CHOICE: "0", **other.pop("attributes", {})}
    return row(number, conventions.SPAN_LLM, attributes, **other)


def insert(engine: TraceStore, *rows: dict[str, Any]) -> None:
    columns = sorted({name for each in rows for name in each})
    engine.insert("otel.otel_traces", columns, ["\n".join(json.dumps(each) for each in rows).encode()])


def rollout(rollout_id: str = "ro-1") -> Rollout:
    return Rollout(rollout_id=rollout_id, input=None, start_time=0.0)


def attempt(seals: dict[str, int] | None = None, rollout_id: str = "ro-1", attempt_id: str = "at-1") -> Attempt:
    return Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0, seals=seals)


async def test_spans_come_by_sequence_then_time_and_once_for_each_identity(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(3), row(1), row(2), row(7, SpanId="s1"), row(1, AttemptId="at-2", SpanId="other"))
    spans = await reader.spans(["ro-1"])
    assert [(span.sequence_id, span.span_id) for span in spans] == [(1, "other"), (1, "s1"), (2, "s2"), (3, "s3")] or [
        (span.sequence_id, span.span_id) for span in spans
    ] == [(1, "s1"), (1, "other"), (2, "s2"), (3, "s3")]
    assert [span.span_id for span in await reader.spans(["ro-1"], attempt_id="at-2")] == ["other"]
    assert await reader.spans([]) == []


async def test_rows_of_the_stock_exporter_have_texts_for_attributes(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, attributes={"n": "1", conventions.LLM_PROMPT_TOKEN_IDS: "[1,2]"}))
    (span,) = await reader.spans(["ro-1"])
    assert span.attributes == {"n": "1", conventions.LLM_PROMPT_TOKEN_IDS: "[1,2]"}


async def test_calls_come_as_flat_columns_in_call_order(engine: TraceStore, reader: TraceReader) -> None:
    second = {
        conventions.LLM_PREFIX_CALL: "1",
        conventions.LLM_PREFIX_CHOICE: "0",
        conventions.LLM_MODEL_VERSION: "3",
        conventions.LLM_INCOMPLETE: "client_gone",
    }
    insert(
        engine,
        call(1, 2, PromptTokenIds=[9], ResponseTokenIds=[], ResponseLogprobs=[], attributes=second),
        call(2, 1, PromptTokenIds=[1, 2, 2**31 - 1], ResponseTokenIds=[5, 6], ResponseLogprobs=[-0.5, -1.5], Duration=250),
        call(2, 1, PromptTokenIds=[1, 2, 2**31 - 1], ResponseTokenIds=[5, 6], ResponseLogprobs=[-0.5, -1.5], Duration=250),
        row(3),
    )
    traces = await reader.traces([rollout()], [attempt({"x": 2})])
    calls = traces.calls
    assert calls.call.tolist() == [1, 2]
    assert calls.sequence.tolist() == [2, 1]
    assert calls.began is not None and calls.ended is not None
    assert calls.began.tolist() == [1_750_000_000_000_000_002, 1_750_000_000_000_000_001]
    assert (calls.ended - calls.began).tolist() == [250, 0]
    assert (calls.prefix_call.tolist(), calls.prefix_choice.tolist()) == ([0, 1], [0, 0])
    assert (calls.prompt.values.dtype, calls.response.values.dtype, calls.logprobs.values.dtype) == (np.int32, np.int32, np.float32)
    assert [calls.prompt[n].tolist() for n in range(2)] == [[1, 2, 2**31 - 1], [9]]
    assert [calls.response[n].tolist() for n in range(2)] == [[5, 6], []]
    assert [calls.logprobs[n].tolist() for n in range(2)] == [[-0.5, -1.5], []]
    assert (calls.model_version, calls.incomplete, calls.process) == (["", "3"], ["", "client_gone"], ["x", "x"])
    assert traces.verdicts["ro-1", "at-1"].kind == "complete"
    assert traces.spans == 3


async def test_what_a_model_server_answered_instead_of_a_reply_is_counted(engine: TraceStore, reader: TraceReader) -> None:
    def failed(number: int, said: str, why: str = "upstream_status", **other: Any) -> dict[str, Any]:
        attributes = {conventions.LLM_INCOMPLETE: why, "http.response.status_code": "400" if said else "502"}
        return call(number, number, StatusMessage=said, attributes=attributes, **other)

    first, second = failed(1, "stop is\nunknown"), failed(2, "stop is\nunknown")
    others = [failed(3, "", "upstream_error"), failed(4, "gone", "client_gone"), failed(5, "HTTP 400", RolloutId="ro-2")]
    insert(engine, first, first, second, *others, call(6, 6))
    traces = await reader.traces([rollout()], [attempt({"x": 5})])
    assert traces.call_errors == {r"HTTP 400: stop is\nunknown": 2, "HTTP 502": 1}
    other = await reader.traces([rollout("ro-2")], [attempt({"x": 1}, "ro-2")])
    assert other.call_errors == {"HTTP 400": 1}
    assert Traces.joined(traces, other).call_errors == {r"HTTP 400: stop is\nunknown": 2, "HTTP 502": 1, "HTTP 400": 1}


async def test_the_steps_of_a_run_lead_from_a_version_of_a_set_and_say_how_many_were_promoted(
    engine: TraceStore, reader: TraceReader
) -> None:
    def cycle(number: int, verdict: str, before: int, after: int, **other: Any) -> dict[str, Any]:
        names = {conventions.TRAIN_RUN: "improve-1", conventions.TRAIN_ALGORITHM: "improve", conventions.TRAIN_RESOURCES: "production"}
        versions = {conventions.TRAIN_VERSION_BEFORE: str(before), conventions.TRAIN_VERSION_AFTER: str(after)}
        facts = {conventions.TRAIN_STEP_NUMBER: str(number), f"{conventions.TRAIN_METRIC}.verdict": verdict}
        received = {"RolloutId": "", "AttemptId": "", "TraceId": trace_id_of("improve-1"), "ReceivedAt": "1750000000.000", **other}
        return row(number, conventions.SPAN_TRAIN_STEP, {**names, **versions, **facts}, **received)

    again = cycle(3, "rolled_back", 3, 5, ReceivedAt="1750000009.000")
    insert(engine, cycle(1, "promoted", 1, 3), cycle(2, "refused", 3, 3), cycle(3, "rolled_back", 3, 4), again, cycle(4, "promoted", 5, 7))
    found = await reader.publishing_steps("production", 10)
    assert [(step.run_id, step.algorithm, step.step, step.version_before, step.version_after, step.verdict) for step in found] == [
        ("improve-1", "improve", 4, "5", "7", "promoted"),
        ("improve-1", "improve", 3, "3", "5", "rolled_back"),
        ("improve-1", "improve", 1, "1", "3", "promoted"),
    ]
    assert await reader.publishing_steps("production", 1) == found[:1] and await reader.publishing_steps("another", 10) == []
    [run] = await reader.runs(10)
    assert (run.steps, run.promoted, run.last_version) == (4, 2, "7")


async def test_calls_of_adopted_traces_count_as_calls_without_numbers(engine: TraceStore, reader: TraceReader) -> None:
    tokens: dict[str, Any] = {"PromptTokenIds": [1, 2], "ResponseTokenIds": [3], "ResponseLogprobs": [-0.5]}
    insert(engine, row(1, conventions.SPAN_LLM, **tokens), row(2, conventions.SPAN_LLM, **tokens), row(3), row(4, conventions.SPAN_LLM))
    traces = await reader.traces([rollout()], [attempt()])
    assert traces.calls.call.tolist() == [1, 2] and [traces.calls.response[n].tolist() for n in range(2)] == [[3], [3]]
    [figures] = await reader.figures([attempt()])
    assert (figures.calls, figures.spans, figures.prompt_tokens, figures.response_tokens) == (2, 4, 4, 2)
    outline, _ = await reader.outline("ro-1", limit=10)
    assert [span.is_call for span in outline] == [True, True, False, False]


async def test_calls_without_a_number_are_told_from_those_with_one(engine: TraceStore, reader: TraceReader) -> None:
    """A call that named no rollout, though its trace belongs to one, between calls that did, with prompts that go on from the first."""
    tokens: dict[str, Any] = {"PromptTokenIds": [1, 2], "ResponseTokenIds": [3], "ResponseLogprobs": [-0.5]}
    base = {conventions.LLM_MESSAGES_CALL: "1", conventions.LLM_MESSAGES_BEFORE: "1"}
    engine_said = {
        conventions.LLM_WEIGHT_VERSIONS: '[["7", 0, 1]]',
        conventions.LLM_ROUTED_EXPERTS: "AAAA",
        conventions.LLM_BRIDGE: '{"refused": "cut"}',
    }
    insert(
        engine,
        call(1, 1, **tokens, attributes={"gen_ai.input.messages": '["first"]', **engine_said}),
        row(2, conventions.SPAN_LLM, {P: "x", "gen_ai.input.messages": '["other"]'}, **tokens),
        call(3, 2, **tokens, attributes={"gen_ai.input.messages": '["second"]', **base}),
    )
    traces = await reader.traces([rollout()], [attempt()], texts=True)
    assert traces.texts is not None
    assert dict(zip(traces.calls.span_id, traces.texts.asked, strict=True)) == {
        "s1": '["first"]', "s2": '["other"]', "s3": '["first", "second"]',
    }  # fmt: skip
    assert len(set(traces.calls.call.tolist())) == 3
    outline, _ = await reader.outline("ro-1", limit=10)
    assert [span.unbridged for span in outline] == ["cut", "", ""]
    told = dict(zip(traces.calls.span_id, zip(traces.texts.versions, traces.texts.experts, traces.texts.bridges, strict=True), strict=True))
    assert told == {"s1": ('[["7", 0, 1]]', "AAAA", '{"refused": "cut"}'), "s2": ("", "", ""), "s3": ("", "", "")}


async def test_choices_of_a_call_count_as_one_call_with_one_prompt(engine: TraceStore, reader: TraceReader) -> None:
    tokens: dict[str, Any] = {"PromptTokenIds": [1, 2, 3], "ResponseTokenIds": [4]}
    choices = [call(number + 1, 1, attributes={conventions.LLM_CHOICE: str(number)}, **tokens) for number in range(3)]
    insert(engine, *choices, call(4, 2, **tokens), call(5, 1, process="y", **tokens))
    [figures] = await reader.figures([attempt()])
    assert (figures.calls, figures.spans, figures.prompt_tokens, figures.response_tokens) == (3, 5, 9, 5)
    run = await reader.run_figures(["ro-1"])
    assert [(row["PromptTokens"], row["ResponseTokens"]) for row in run.to_pylist()] == [(9, 5)]
    calls = (await reader.traces([rollout()], [attempt()])).calls
    assert calls.count == 3
    assert calls.further_choice.tolist() == [False, True, True, False, False]
    assert calls.several_choices.tolist() == [True, True, True, False, False]


async def test_conversation_ids_are_read_with_figures_and_spans(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(2, attributes={conventions.CONVERSATION_ID: "b"}), row(1, attributes={conventions.CONVERSATION_ID: "a"}), row(3))
    (figures,) = await reader.figures([attempt()])
    assert figures.conversation_ids == ["a", "b"]
    outline, _ = await reader.outline("ro-1", limit=10)
    assert [span.conversation_id for span in outline] == ["a", "b", ""]


async def test_tokens_of_a_call_without_ids_are_those_that_its_server_counted(engine: TraceStore, reader: TraceReader) -> None:
    counted = {"gen_ai.usage.input_tokens": "7", "gen_ai.usage.output_tokens": "5"}
    ids: dict[str, Any] = {"PromptTokenIds": [1, 2], "ResponseTokenIds": [3, 4, 5], "ResponseLogprobs": [-0.5] * 3}
    further = {**counted, conventions.LLM_CHOICE: "1"}
    insert(engine, call(1, 1, attributes=counted), call(2, 1, attributes=further), call(3, 2, attributes=counted, **ids))
    [figures] = await reader.figures([attempt()])
    [whole] = (await reader.run_figures(["ro-1"])).to_pylist()
    assert (figures.calls, figures.prompt_tokens, figures.response_tokens) == (2, 14, 8)
    assert (whole["PromptTokens"], whole["ResponseTokens"]) == (14, 8)


async def test_a_call_is_named_after_the_nearest_agent_above_it(engine: TraceStore, reader: TraceReader) -> None:
    insert(
        engine,
        row(1, attributes={AGENT_NAME: "boss"}),
        row(2, attributes={AGENT_NAME: "helper"}, ParentSpanId="s1"),
        row(3, ParentSpanId="s2"),
        call(4, 1, ParentSpanId="s3"),
        call(5, 2, ParentSpanId="s1"),
        call(6, 3, ParentSpanId="nowhere"),
        call(7, 4, attributes={AGENT_NAME: "self"}),
    )
    traces = await reader.traces([rollout()], [attempt({"x": 4})])
    assert traces.calls.agent == ["helper", "boss", "", "self"]


async def test_nodes_of_a_langgraph_graph_and_runs_of_our_langchain_handler_are_agents(engine: TraceStore, reader: TraceReader) -> None:
    def task(number: int, node: str, integration: str, parent: str) -> dict[str, Any]:
        labels = {"langgraph_node": node, "ls_integration": integration}
        attributes = {f"traceloop.association.properties.{key}": value for key, value in labels.items()}
        return row(number, f"execute_task {node}", attributes, ParentSpanId=parent)

    insert(
        engine,
        row(1, attributes={AGENT_NAME: "LangGraph"}),
        task(2, "write", "langgraph", "s1"),
        row(3, attributes={AGENT_NAME: "inner"}, ParentSpanId="s2"),
        task(4, "model", "langchain_create_agent", "s3"),
        row(5, "langchain.Chain.check", {"agent.name": "check"}, ParentSpanId="s1"),
        call(6, 1, ParentSpanId="s2"),
        call(7, 2, ParentSpanId="s4"),
        call(8, 3, ParentSpanId="s5"),
    )
    traces = await reader.traces([rollout()], [attempt({"x": 3})])
    assert traces.calls.agent == ["write", "inner", "check"]


async def test_a_workflow_names_calls_that_no_agent_below_it_does(engine: TraceStore, reader: TraceReader) -> None:
    workflow = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "crew"}
    insert(
        engine,
        row(1, "invoke_workflow crew", workflow),
        row(2, "invoke_agent helper", {AGENT_NAME: "helper", "gen_ai.workflow.name": "crew"}, ParentSpanId="s1"),
        row(3, "search_memory", {"gen_ai.operation.name": "search_memory"}, ParentSpanId="s2"),
        row(4, "chat m", {"gen_ai.workflow.name": "crew"}, ParentSpanId="s3"),
        call(5, 1, ParentSpanId="s4"),
        call(6, 2, ParentSpanId="s1"),
    )
    traces = await reader.traces([rollout()], [attempt({"x": 2})])
    assert traces.calls.agent == ["helper", "crew"]
    shown, _ = await reader.outline(rollout().rollout_id, limit=10)
    assert [(each.agent, each.is_agent, each.tool) for each in shown[:3]] == [
        ("crew", True, ""),
        ("helper", True, ""),
        ("", False, "search_memory"),
    ]


async def test_rewards_are_ordered_and_counted_once(engine: TraceStore, reader: TraceReader) -> None:
    two = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": "0.5", "agentlightning.reward.1.name": "style"}
    insert(
        engine,
        row(9, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): "1.0", conventions.reward_name_key(0): "primary"}),
        row(4, conventions.SPAN_ANNOTATION, {**two, conventions.reward_value_key(1): "-2"}),
        row(8, conventions.SPAN_ANNOTATION, {**two, conventions.reward_value_key(1): "-2"}, SpanId="s4"),
        row(5, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): "not a number"}),
    )
    traces = await reader.traces([rollout()], [attempt()])
    found = [(reward.sequence, reward.index, reward.name, reward.value) for reward in traces.rewards["ro-1", "at-1"]]
    assert found == [(4, 0, "primary", 0.5), (4, 1, "style", -2.0), (9, 0, "primary", 1.0)]
    assert traces.verdicts["ro-1", "at-1"].kind == "empty"


async def test_seals_count_spans_but_not_themselves_nor_the_attempt_span(engine: TraceStore, reader: TraceReader) -> None:
    def seal(number: int, spans: int) -> dict[str, Any]:
        counts = {
            conventions.SEAL_SPANS: str(spans),
            conventions.SEAL_DROPPED: "0",
            **({conventions.SEAL_CLOSING: "true"} if spans == 2 else {}),
        }
        return row(number, conventions.SPAN_SEAL, {P: "p", **counts})

    insert(
        engine,
        row(1, conventions.SPAN_ATTEMPT),
        row(2, attributes={P: "p"}),
        seal(3, 1),
        row(4, attributes={P: "p"}),
        seal(5, 2),
        row(2, attributes={P: "p"}),
    )
    traces = await reader.traces([rollout()], [attempt()])
    assert traces.verdicts["ro-1", "at-1"].kind == "complete"


async def test_incomplete_attempts_are_read_again_until_the_deadline(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, attributes={P: "p"}))
    started = time.monotonic()
    traces = await reader.traces([rollout()], [attempt({"p": 2})], deadline_seconds=0.3)
    assert time.monotonic() - started >= 0.3
    verdict = traces.verdicts["ro-1", "at-1"]
    assert (verdict.kind, verdict.missing) == ("incomplete", 1)
    insert(engine, row(2, attributes={P: "p"}))
    again = await reader.traces([rollout()], [attempt({"p": 2})])
    assert again.verdicts["ro-1", "at-1"].kind == "complete"
    assert again.digest != traces.digest
    assert (traces.highest_sequence, again.highest_sequence) == ({"ro-1": 1}, {"ro-1": 2})


@pytest.mark.full
@pytest.mark.parametrize("state", ["frozen", "dead"])
async def test_the_deadline_holds_where_a_collector_does_not_answer_and_the_reasons_name_it(
    engine: TraceStore, reader: TraceReader, state: str
) -> None:
    insert(engine, row(1, attributes={P: "p"}), row(2, RolloutId="ro-2", SpanId="s2"))
    rollouts, attempts = [rollout(), rollout("ro-2")], [attempt({"p": 1}), attempt(rollout_id="ro-2")]
    with contextlib.ExitStack() as open_sockets:
        if state == "frozen":  # a process that was stopped: its kernel takes connections, and nobody reads them
            listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]
        else:
            port = free_port()
        reader.collectors = (f"http://127.0.0.1:{port}",)
        async with asyncio.timeout(DEADLINE + SLACK):  # an answer that takes four deadlines is too late
            traces = await reader.traces(rollouts, attempts, deadline_seconds=DEADLINE)
        async with asyncio.timeout(DEADLINE + SLACK):
            complete = await reader.traces(rollouts[:1], attempts[:1], deadline_seconds=DEADLINE)
    assert complete.verdicts["ro-1", "at-1"].kind == traces.verdicts["ro-1", "at-1"].kind == "complete"
    unknown = traces.verdicts["ro-2", "at-1"]
    assert unknown.kind == "incomplete"
    assert [reason for reason in unknown.reasons if f"http://127.0.0.1:{port}" in reason]


async def test_an_error_names_both_if_clickhouse_does_not_answer_either() -> None:
    ports = free_ports(2)
    async with (
        TraceReader(f"http://127.0.0.1:{ports[0]}", collectors=[f"http://127.0.0.1:{ports[1]}"]) as gone,
        asyncio.timeout(DEADLINE + SLACK),
    ):
        with pytest.raises(UnavailableError, match=f"{ports[0]}.*{ports[1]}"):
            await gone.traces([rollout()], [attempt()], deadline_seconds=DEADLINE)


async def test_an_unproven_attempt_of_a_hooked_agent_is_an_alarm(
    engine: TraceStore, reader: TraceReader, caplog: pytest.LogCaptureFixture
) -> None:
    insert(engine, row(1, conventions.SPAN_ATTEMPT), row(2))
    assert not (await reader.traces([rollout()], [attempt()])).alarms
    insert(engine, row(3, conventions.SPAN_ATTEMPT, {conventions.ATTEMPT_HOOKED: "true"}))
    nothing_read = attempt().model_copy(update={"ledger": AttemptLedger(reach="elsewhere")})
    traces = await reader.traces([rollout()], [nothing_read])
    assert traces.alarms == [("ro-1", "at-1")]
    assert [record.levelname for record in caplog.records if "ran under the hook" in record.message] == ["WARNING"]
    insert(engine, row(4, attributes={P: "p"}))
    assert not (await reader.traces([rollout()], [attempt({"p": 1})])).alarms


async def test_a_verdict_knows_late_spans_callers_orphans_and_last_seals(engine: TraceStore, reader: TraceReader) -> None:
    late = row(3, attributes={P: "p", conventions.LATE: "true"})
    closing = {P: "x", conventions.SEAL_SPANS: "1", conventions.SEAL_CLOSING: "true"}
    insert(engine, row(1, attributes={P: "p"}), late, row(4, ParentSpanId="gone"), row(5, ParentSpanId="s1"))
    insert(engine, call(6, 1, attributes={conventions.LLM_CALLER: "m"}), row(7, conventions.SPAN_SEAL, closing))
    process = ProcessRecord(pid=7, command="python agent.py", marker="p", begun=1, ended=1, closed=True)
    ledger = AttemptLedger(reach="hooked", processes=[process])
    known = attempt({}).model_copy(update={"ledger": ledger, "proxies": {"x": "http://proxy"}})
    for traces in (await reader.traces([rollout()], [known], deadline_seconds=0), None):
        verdict = traces.verdicts["ro-1", "at-1"] if traces else (await reader.figures([known]))[0].verdict
        assert [reason.split(",")[0] for reason in verdict.reasons] == ["process m made model calls"]
        (note,) = verdict.notes
        assert note.startswith("2 spans are not counted (1 of them with a parent that never arrived)")


async def test_a_seal_span_without_a_count_is_not_a_seal(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, conventions.SPAN_SEAL, {P: "service"}), call(2, 1))
    known = attempt({"x": 1}).model_copy(update={"ledger": AttemptLedger(reach="elsewhere", over=1.0)})
    for traces in (await reader.traces([rollout()], [known], deadline_seconds=0), None):
        verdict = traces.verdicts["ro-1", "at-1"] if traces else (await reader.figures([known]))[0].verdict
        assert verdict.kind == "incomplete"
        assert [reason.split(":")[0] for reason in verdict.reasons] == ["process service sent no seal"]


async def test_a_seal_sent_after_the_agents_end_proves_its_process(engine: TraceStore, reader: TraceReader) -> None:
    counts = {P: "service", conventions.SEAL_SPANS: "1", conventions.SEAL_DROPPED: "0"}
    insert(engine, row(1, attributes={P: "service"}), row(2, conventions.SPAN_SEAL, counts, Timestamp="1750000010.000000000"))
    for over, kind in ((1750000009.0, "complete"), (1750000009.8, "incomplete"), (1750000011.0, "incomplete"), (None, "incomplete")):
        known = attempt({}).model_copy(update={"ledger": AttemptLedger(reach="elsewhere", over=over)})
        traces = await reader.traces([rollout()], [known], deadline_seconds=0)
        figures = await reader.figures([known])
        assert (traces.verdicts["ro-1", "at-1"].kind, figures[0].verdict.kind) == (kind, kind)


async def test_figures_of_an_attempt_that_has_just_ended_are_read_behind_a_barrier(engine: TraceStore, reader: TraceReader) -> None:
    barriers = 0

    async def barrier(_: web.Request) -> web.Response:
        """A collector that holds the last span back until a barrier."""
        nonlocal barriers
        barriers += 1
        insert(engine, row(2, attributes={P: "p"}))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/barrier", barrier)
    insert(engine, row(1, attributes={P: "p"}))
    now = time.time()
    ended = {since: attempt({"p": 2}).model_copy(update={"end_time": now - since}) for since in (0.0, 10 * SETTLED_SECONDS)}
    async with TestServer(app) as collector:
        reader.collectors = (str(collector.make_url("")).rstrip("/"),)
        (running,) = await reader.figures([attempt({"p": 2}).model_copy(update={"end_time": None})])
        (old,) = await reader.figures([ended[10 * SETTLED_SECONDS]])
        assert (running.verdict.kind, running.final, old.verdict.kind, old.final, barriers) == ("incomplete", False, "incomplete", True, 0)
        (fresh,) = await reader.figures([ended[0.0]])
        assert (fresh.verdict.kind, fresh.final, fresh.spans, barriers) == ("complete", True, 2, 1)
        (lost,) = await reader.figures([ended[0.0].model_copy(update={"seals": {"p": 3}})])
        assert (lost.verdict.kind, lost.verdict.missing, lost.final) == ("incomplete", 1, False)


async def test_a_duplicate_row_does_not_change_the_digest(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1), row(2))
    before = await reader.traces([rollout()], [attempt()])
    insert(engine, row(2))
    after = await reader.traces([rollout()], [attempt()])
    assert (after.digest, after.spans) == (before.digest, before.spans)


async def test_a_call_has_the_sampling_parameters_of_its_span(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, call(1, 1, attributes={"gen_ai.request.temperature": "0.2", "gen_ai.request.top_p": "1"}), call(2, 2))
    calls = (await reader.traces([rollout()], [attempt()])).calls
    assert calls.temperature is not None and calls.top_p is not None
    assert [str(value) for value in (*calls.temperature, *calls.top_p)] == ["0.2", "nan", "1.0", "nan"]


@pytest.mark.full
async def test_two_reads_joined_are_one_read_of_all(engine: TraceStore, reader: TraceReader) -> None:
    messages = {"gen_ai.input.messages": '[{"role": "user", "parts": []}]'}
    for number in (1, 2):
        own: dict[str, Any] = {"RolloutId": f"ro-{number}", "TraceId": f"t{number}"}
        reply: dict[str, Any] = {"ResponseTokenIds": [number, 7], "ResponseLogprobs": [-0.5, -1.0]}
        insert(engine, row(9, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): str(number)}, **own))
        insert(engine, call(1, 1, PromptTokenIds=[number], **own, **reply, attributes=messages if number == 2 else {}))
    rollouts, attempts = [rollout("ro-1"), rollout("ro-2")], [attempt(rollout_id="ro-1"), attempt(rollout_id="ro-2")]
    whole = await reader.traces(rollouts, attempts, texts=True)
    parts = [await reader.traces([r], [a], texts=bool(n)) for n, (r, a) in enumerate(zip(rollouts, attempts, strict=True))]
    joined = Traces.joined(*parts)
    plain = [{name: str(value) for name, value in vars(each.calls).items()} for each in (joined, whole)]
    assert plain[0] == plain[1]
    assert vars(joined.texts) == vars(whole.texts)
    assert (joined.digest, joined.spans, joined.highest_sequence) == (whole.digest, whole.spans, whole.highest_sequence)
    assert (joined.rollouts, joined.rewards, joined.verdicts) == (whole.rollouts, whole.rewards, whole.verdicts)


async def test_attempts_without_spans_and_rollouts_without_attempts_are_included(reader: TraceReader) -> None:
    traces = await reader.traces([rollout("ro-a"), rollout("ro-b")], [attempt(rollout_id="ro-a")])
    assert {key: verdict.kind for key, verdict in traces.verdicts.items()} == {("ro-a", "at-1"): "empty"}
    assert [r.rollout_id for r in traces.rollouts] == ["ro-a", "ro-b"]
    assert (len(traces.calls), traces.rewards, traces.spans) == (0, {}, 0)
    nothing = await reader.traces([], [])
    assert (nothing.rollouts, len(nothing.calls)) == ([], 0)


async def test_a_reward_that_the_runner_gave_counts_whatever_the_agent_emits_later(engine: TraceStore, reader: TraceReader) -> None:
    value = conventions.reward_value_key(0)
    given = row(2, conventions.SPAN_ANNOTATION, {value: "0.25", conventions.REWARD_GIVEN: "true"})
    insert(engine, row(1, conventions.SPAN_ANNOTATION, {value: "0.5"}), given, row(9, conventions.SPAN_ANNOTATION, {value: "1.0"}))
    traces = await reader.traces([rollout()], [attempt()])
    assert [reward.value for reward in traces.rewards["ro-1", "at-1"]] == [0.5, 1.0, 0.25], "the last one counts"
    (figures,) = await reader.figures([attempt()])
    assert figures.reward == 0.25
    assert (await reader.run_figures(["ro-1"])).column("Reward").to_pylist() == [0.25]


async def test_a_reward_that_began_after_its_attempt_had_ended_does_not_count(engine: TraceStore, reader: TraceReader) -> None:
    value, late = conventions.reward_value_key(0), {conventions.LATE: "true"}
    insert(engine, row(1, attributes={P: "p"}), row(2, conventions.SPAN_ANNOTATION, {value: "0.5", P: "p"}))
    insert(engine, row(8, conventions.SPAN_ANNOTATION, {value: "99.0", P: "p", **late}))
    insert(engine, row(9, conventions.SPAN_ANNOTATION, {value: "100.0", **late}))
    insert(engine, row(3, RolloutId="ro-2"), row(9, conventions.SPAN_ANNOTATION, {value: "100.0", **late}, RolloutId="ro-2"))
    traces = await reader.traces([rollout()], [attempt({"p": 2})])
    assert [reward.value for reward in traces.rewards["ro-1", "at-1"]] == [0.5]
    (figures,) = await reader.figures([attempt({"p": 2})])
    assert figures.reward == 0.5
    for verdict in (traces.verdicts["ro-1", "at-1"], figures.verdict):
        assert (verdict.kind, verdict.notes) == ("complete", []), "it is in no count either"
    found = (await reader.run_figures(["ro-1", "ro-2"])).to_pylist()
    assert {each["RolloutId"]: each["Reward"] for each in found} == {"ro-1": 0.5, "ro-2": None}
    late_spans = [
        span for span in await reader.spans(["ro-1"]) if find_final_reward([span]) is None and span.name == conventions.SPAN_ANNOTATION
    ]
    assert len(late_spans) == 2 and find_final_reward(await reader.spans(["ro-1"])) == 0.5, "they are shown"


async def test_the_reward_of_a_rollout_is_that_of_its_latest_attempt(engine: TraceStore, reader: TraceReader) -> None:
    """An earlier attempt, which training refuses, was rewarded: after the latest one (ro-2), or where that has no reward (ro-1)."""
    value = conventions.reward_value_key(0)
    early: dict[str, Any] = {"AttemptId": "at-0"}
    other: dict[str, Any] = {"RolloutId": "ro-2"}
    insert(
        engine,
        row(1, conventions.SPAN_ANNOTATION, {value: "1.0"}, **early),
        row(2),
        row(9, conventions.SPAN_ANNOTATION, {value: "1.0"}, **early, **other),
        row(3, conventions.SPAN_ANNOTATION, {value: "0.25"}, **other),
        row(4, **other),
    )
    found = (await reader.run_figures(["ro-1", "ro-2"])).to_pylist()
    assert {each["RolloutId"]: each["Reward"] for each in found} == {"ro-1": None, "ro-2": 0.25}


async def test_a_rewards_name_may_hold_any_character(engine: TraceStore, reader: TraceReader) -> None:
    name = "a 'quoted' \"name\" \\ with,\n{braces: 1} and ü"
    insert(engine, row(1, conventions.SPAN_ANNOTATION, {conventions.reward_name_key(0): name, conventions.reward_value_key(0): "0.25"}))
    (reward,) = (await reader.traces([rollout()], [attempt()])).rewards["ro-1", "at-1"]
    assert (reward.name, reward.value) == (name, 0.25)


async def test_the_rollouts_of_a_trace_are_found_whatever_times_its_spans_claim(engine: TraceStore, reader: TraceReader) -> None:
    times = ("1900-01-02 00:00:00", "1970-01-01 00:00:00", "2025-06-15 15:06:40.5", "2106-02-07 06:28:15.9", "2250-01-01 00:00:00")
    for number, claimed in enumerate(times):  # an insert each: a part of its own, that could be left closed
        insert(engine, row(number, Timestamp=claimed, TraceId=f"t{number}", RolloutId=f"ro-{number}"))
        insert(engine, row(number, Timestamp=claimed, TraceId="shared", RolloutId=f"ro-{number}"))
    for number in range(len(times)):
        assert await reader.rollouts_of_traces([f"t{number}"]) == [f"ro-{number}"]
    everyone = [f"ro-{number}" for number in range(len(times))]
    assert sorted(await reader.rollouts_of_traces(["shared"])) == everyone
    assert sorted(await reader.rollouts_of_traces([f"t{number}" for number in range(len(times))])) == everyone
    assert await reader.rollouts_of_traces(["nobody's"]) == []


async def test_the_arms_of_a_conversation_are_those_of_its_rollout_once_it_has_one(engine: TraceStore, reader: TraceReader) -> None:
    def by(arm: str, number: int, trace: str, rollout_id: str, more: dict[str, str] | None = None, *, second: int = 10) -> dict[str, Any]:
        known = {"TraceId": trace, "RolloutId": rollout_id, "Timestamp": f"17500000{second:02d}.{number:09d}"}
        return row(number, conventions.SPAN_LLM, {conventions.LLM_ARM: arm, **(more or {})}, **known)

    insert(
        engine,
        by("canary", 1, "adopted", ""), by("canary", 1, "adopted", "ro-a"),  # two rows of one span
        by("canary", 2, "again", "ro-a"), by("canary", 3, "waits", ""),
        by("promoted", 8, "on", "ro-o", second=9), by("canary", 9, "on", "ro-o"),
        by("promoted", 4, "mixed", "ro-m"), by("canary", 5, "mixed", "ro-m"),
        row(10, "POST /chat", {conventions.SERVED_ARM: "canary"}, TraceId="product", RolloutId="", Timestamp="1750000010.000000010"),
        by("promoted", 6, "earlier", "ro-e", second=9), row(7, TraceId="elsewhere"),
        by("promoted", 11, "stood in for", "ro-f", {conventions.LLM_CANARY_FAILED: "canary"}),
        by("promoted", 12, "too many", "ro-t", {conventions.LLM_CANARY_FULL: "canary"}),
    )  # fmt: skip
    params = {"since": 1_750_000_010 * 10**9, **names_in("arms")}
    rows = await reader.query(named_query("arms"), params=params)
    assert {each["Conversation"]: each["Full"] for each in rows if each["Full"]} == {"ro-t": ["canary"]}
    found = [(each["Conversation"], each["RolloutId"], each["Arms"]) for each in rows]
    asked = {each["Conversation"]: [first // 10**9 - 1_750_000_000 for first in each["ArmNanos"]] for each in rows}
    assert (asked["ro-a"], asked["ro-o"], asked["ro-m"]) == ([10], [10, 9], [10, 10])
    both = ["canary", "promoted"]
    product, *found = found
    assert product == ("product", "", ["canary"])
    assert found == [
        ("ro-a", "ro-a", ["canary"]), ("ro-f", "ro-f", both), ("ro-m", "ro-m", both), ("ro-o", "ro-o", both),
        ("ro-t", "ro-t", ["promoted"]), ("waits", "", ["canary"]),
    ]  # fmt: skip


async def test_arrow_and_rows_agree(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1), row(2))
    sql = "SELECT SpanId, SequenceId FROM otel_traces WHERE RolloutId = {r:String} ORDER BY SequenceId"
    assert (await reader.arrow(sql, params={"r": "ro-1"})).to_pylist() == await reader.query(sql, params={"r": "ro-1"})


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("SELECT 1 FORMAT Vertical", "`FORMAT Vertical`"),
        ("SELECT 1 format Null;", "`format Null`"),
        ("SELECT 1 FORMAT CSV SETTINGS max_threads = 1", "`FORMAT CSV`"),
        ("SELECT 1 FORMAT Pretty -- for me", "`FORMAT Pretty`"),
        ("SELECT 1 FORMAT JSON /* for */ /* me */;", "`FORMAT JSON`"),
    ],
)
async def test_a_users_query_may_not_name_a_format(engine: TraceStore, reader: TraceReader, query: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        await reader.query(query, own=False)
    with pytest.raises(UsageError, match=named):
        await reader.sql(query, limit=1)


async def test_calls_come_in_their_order_whatever_the_order_of_the_table(engine: TraceStore, reader: TraceReader) -> None:
    insert(
        engine,
        *(call(9 - number, number, PromptTokenIds=[number], process="b") for number in (1, 2, 3)),
        *(call(20 + number, number, PromptTokenIds=[10 + number] * number, process="a") for number in (1, 2)),
        call(30, 1, process="a", SpanId="s21", PromptTokenIds=[99]),
        row(40, conventions.SPAN_ANNOTATION, {f"{conventions.REWARD}.0.name": "given", f"{conventions.REWARD}.0.value": "1"}),
    )
    calls = (await reader.traces([rollout()], [attempt()], deadline_seconds=0.0)).calls
    assert calls.process == ["a", "a", "b", "b", "b"]
    assert [list(prompt) for prompt in calls.prompt] == [[11], [12, 12], [1], [2], [3]]
    assert calls.sequence.tolist() == [21, 22, 8, 7, 6]


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads with little memory, before the reader has made a connection."""
    for limited in (chdb.READ_LIMITS, server_engine.READ_LIMITS):
        monkeypatch.setitem(limited, "max_memory_usage", 128 << 20)


def insert_long_calls(engine: TraceStore, rollout_id: str, count: int) -> None:
    """Calls 1 to `count`, each with 1.6 MB of token ids, in parts of their own."""
    for number in range(1, count + 1):
        engine.command(
            "INSERT INTO otel.otel_traces (TraceId, SpanId, SpanName, SpanAttributes, RolloutId, AttemptId, SequenceId, PromptTokenIds) "
            f"SELECT 't', 's{number}', '{conventions.SPAN_LLM}', map('{conventions.LLM_CALL}', '{number}', '{P}', 'x'), "
            f"'{rollout_id}', 'at-1', {number}, range(400000)"
        )


@pytest.mark.full
@pytest.mark.usefixtures("small_reads")
async def test_rollouts_too_large_for_one_read_are_read_in_parts(engine: TraceStore, reader: TraceReader) -> None:
    for rollout_id in ("ro-1", "ro-2", "ro-3"):
        insert_long_calls(engine, rollout_id, 16)
    ids = ["ro-1", "ro-2", "ro-3"]
    found = await reader.traces([rollout(each) for each in ids], [attempt({"x": 16}, each) for each in ids], deadline_seconds=0.0)
    assert {verdict.kind for verdict in found.verdicts.values()} == {"complete"}
    assert found.calls.rollout_id == [each for each in ids for _ in range(16)]
    assert {len(prompt) for prompt in found.calls.prompt} == {400_000}


@pytest.fixture
def asked(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The rollouts of each query, of three at most; ClickHouse has no time for more than two."""
    fetch, queries = reader._http.fetch, list[list[str]]()  # pyright: ignore[reportPrivateUsage] - the queries are counted

    async def limited(sql: str, format_name: str, params: Any = None, **more: Any) -> bytearray:
        queries.append(list(params["rollouts"]))
        if len(queries[-1]) > 2:
            error = QueryError("Code: 159. Timeout exceeded")
            error.code = 159
            raise error
        return await fetch(sql, format_name, params, **more)

    monkeypatch.setattr("agl_otel.traces.queries.ROLLOUTS_PER_QUERY", 3)
    monkeypatch.setattr(reader._http, "fetch", limited)  # pyright: ignore[reportPrivateUsage]
    return queries


async def test_many_rollouts_are_read_in_parts_and_those_that_take_too_long_in_halves(
    engine: TraceStore, reader: TraceReader, asked: list[list[str]]
) -> None:
    ids = [f"ro-{number}" for number in range(1, 6)]
    insert(engine, *(call(1, 1, RolloutId=each, TraceId=each, PromptTokenIds=[number]) for number, each in enumerate(ids)))
    given = ids[::-1]
    found = await reader.traces(
        [rollout(each) for each in given], [attempt(rollout_id=each) for each in given], texts=True, deadline_seconds=0.0
    )
    assert asked == [ids[:3], ids[:1], ids[1:3], ids[3:]] * 2, "the calls, then their texts"
    assert (found.calls.rollout_id, [each.rollout_id for each in found.rollouts], found.spans) == (ids, given, 5)
    assert found.texts is not None and len(found.texts.asked) == 5
    asked.clear()
    assert [span.rollout_id for span in await reader.spans(given)] == ids
    assert asked == [ids[:3], ids[:1], ids[1:3], ids[3:]]


async def test_a_rollout_that_takes_too_long_alone_is_an_error(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike one that is too large: a busy ClickHouse may read it later."""

    async def late(*_: Any, **__: Any) -> bytearray:
        error = QueryError("Code: 159. Timeout exceeded")
        error.code = 159
        raise error

    monkeypatch.setattr(reader._http, "fetch", late)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(QueryError, match="Timeout"):
        await reader.traces([rollout("ro-1"), rollout("ro-2")], [], deadline_seconds=0.0)


@pytest.mark.full
@pytest.mark.usefixtures("small_reads")
async def test_a_rollout_too_large_alone_is_left_out_and_the_others_are_read(engine: TraceStore, reader: TraceReader) -> None:
    insert_long_calls(engine, "ro-2", 80)
    insert(engine, call(1, 1, PromptTokenIds=[1]), call(1, 1, RolloutId="ro-3", PromptTokenIds=[3]))
    ids = ["ro-1", "ro-2", "ro-3"]
    found = await reader.traces([rollout(each) for each in ids], [attempt({"x": 1}, each) for each in ids], texts=True)
    assert [found.verdicts[each, "at-1"].kind for each in ids] == ["complete", "incomplete", "complete"]
    assert "cannot be read" in found.verdicts["ro-2", "at-1"].reasons[0]
    assert found.calls.rollout_id == ["ro-1", "ro-3"]
    alone = await reader.traces([rollout("ro-2")], [attempt({"x": 1}, "ro-2")])
    assert (len(alone.calls), [verdict.kind for verdict in alone.verdicts.values()]) == (0, ["incomplete"])


def test_a_read_of_rollouts_takes_two_granules_of_each_at_most(engine: TraceStore) -> None:
    engine.command(
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, RolloutId, AttemptId, SequenceId) "
        "SELECT 1750000000, hex(intDiv(number, 12)), hex(number), 'work', concat('ro-', hex(sipHash64(intDiv(number, 12)))), 'at-1', "
        "number % 12 FROM numbers(60000)"
    )
    chosen = [
        str(row[0]) for row in engine.select("SELECT DISTINCT RolloutId FROM otel.otel_traces ORDER BY cityHash64(RolloutId) LIMIT 16")
    ]
    plan = engine.select(f"EXPLAIN indexes = 1 {named_query('traces')}", {"rollouts": chosen})
    granules = [int(found[1]) for line in plan if (found := re.search(r"Granules: (\d+)/", str(line[0])))]
    assert 0 < min(granules) <= 2 * len(chosen)


async def test_a_read_goes_on_at_once_at_another_address_of_clickhouse(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, call(1, 1, PromptTokenIds=[1]))
    answers = reader._http.url  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(60), TraceReader(f"http://127.0.0.1:{free_port()}", endpoints=[answers]) as moved:
        found = await moved.traces([rollout("ro-1")], [attempt({"x": 1}, "ro-1")], barrier=False, deadline_seconds=10_000)
    assert found.calls.rollout_id == ["ro-1"]


def test_a_conversation_is_found_by_its_index(engine: TraceStore) -> None:
    engine.command(
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, RolloutId, SequenceId, SpanAttributes) "
        "SELECT 1750000000, hex(number), hex(number), 'work', concat('ro-', hex(sipHash64(number))), 0, "
        "map('gen_ai.conversation.id', concat('talk-', toString(number))) FROM numbers(60000)"
    )
    plan = engine.select(f"EXPLAIN indexes = 1 {named_query('conversation')}", {"conversation": "talk-777"})
    granules = [int(found[1]) for line in plan if (found := re.search(r"Granules: (\d+)/", str(line[0])))]
    assert min(granules) <= 2, "of 118; each has a false positive once in a thousand times"


async def test_reads_come_in_blocks_of_four_mebibytes(engine: TraceStore, reader: TraceReader) -> None:
    """Each block costs both sides, and rows of random rollouts would come in many small ones."""
    engine.command(
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, StatusMessage, RolloutId, AttemptId, SequenceId) "
        "SELECT 1750000000, 't', hex(number), 'work', repeat('x', 512), 'ro-1', 'at-1', number FROM numbers(140000)"
    )
    blocks = (
        "SELECT uniqExact(blockNumber()) AS n, countIf(endsWith(StatusMessage, 'x')) AS rows FROM otel.otel_traces SETTINGS max_threads = 1"
    )
    [found] = await reader.query(blocks)
    assert int(found["rows"]) == 140_000
    assert int(found["n"]) < 30, "with ClickHouse's own setting of 1 MB there are 90"


def test_numbers_among_facts_are_read_as_clickhouse_reads_them(engine: TraceStore) -> None:
    texts = ["", "7", "-3", "+5", " 7", "1_0", "1e3", "0x10", "1.0", str((1 << 63) - 1), str(1 << 63), str(-(1 << 63)), "9" * 50, "٣"]
    found = engine.select("SELECT toInt64OrZero(arrayJoin({texts:Array(String)}))", {"texts": texts})
    assert [integer(text) for text in texts] == [int(str(row[0])) for row in found]


async def test_of_a_fact_that_a_span_has_twice_the_first_counts(engine: TraceStore, reader: TraceReader) -> None:
    twice = f"map('{conventions.PROCESS}', 'x', '{conventions.LLM_CALL}', '1', '{conventions.LLM_CALL}', '2')"
    engine.command(
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, RolloutId, AttemptId, SequenceId, Facts) "
        f"SELECT 1750000000, 't', 's1', '{conventions.SPAN_LLM}', 'ro-1', 'at-1', 1, {twice}"
    )
    assert (await reader.traces([rollout()], [attempt()], barrier=False, deadline_seconds=0)).calls.call.tolist() == [1]
