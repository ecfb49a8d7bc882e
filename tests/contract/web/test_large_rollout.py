"""One attempt of 100,000 spans in one trace: pages and Jaeger's ports return a bounded part of it, with a note."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.spans import LEFT_OUT, TRACE_SPANS
from agl_otel.web.views import OUTLINE_SPANS, READ_SPANS
from agl_otel_hook import conventions
from tests.contract.collector.otlp import attributes, span_request
from tests.contract.web.browser import look
from tests.contract.web.conftest import Web
from tests.contract.web.test_jaeger import spans_of, traces

pytestmark = pytest.mark.full
SPANS, CALLS, AT_ONCE = 100_000, 500, 10_000
STEP = SPANS // CALLS
TEXT = "what a tool has found, at some length " * 10


@dataclass(frozen=True)
class Large:
    """Ids of the large rollout."""

    rollout_id: str
    attempt_id: str
    trace_id: str


def message_json(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


@pytest.fixture(scope="module")
def large(web: Web) -> Large:
    """Store a rollout with one model call per 200 spans; the others are tool calls."""
    begun = web.rest("POST", "/rollouts", {"input": "a long day"}).json
    ids = {conventions.ROLLOUT_ID: begun["rollout_id"], conventions.ATTEMPT_ID: begun["attempt"]["attempt_id"]}
    trace_id, start = os.urandom(16), time.time_ns() - 10**12
    for first in range(1, SPANS + 1, AT_ONCE):
        request = ExportTraceServiceRequest()
        group = request.resource_spans.add()
        group.resource.attributes.extend(attributes({"service.name": "a-long-day", **ids}))
        spans = group.scope_spans.add().spans
        for number in range(first, first + AT_ONCE):
            call = number // STEP + 1 if number % STEP == STEP // 2 else 0
            content: dict[str, Any] = {"gen_ai.tool.name": "look", "result": f"{number} {TEXT}"}
            if call:
                asked, replied = message_json("user", f"question {call}"), message_json("assistant", f"answer {call}")
                messages = {"gen_ai.input.messages": asked, "gen_ai.output.messages": replied}
                tokens = {conventions.LLM_PROMPT_TOKEN_IDS: [1, 2, 3], conventions.LLM_RESPONSE_TOKEN_IDS: [4, call]}
                content = {
                    **messages,
                    **tokens,
                    conventions.LLM_CALL: call,
                    conventions.LLM_CHOICE: 0,
                    conventions.PROCESS: "p",
                    "gen_ai.request.model": "m",
                }
            spans.append(
                Span(
                    trace_id=trace_id,
                    span_id=number.to_bytes(8, "big"),
                    parent_span_id=b"" if number == 1 else (1 if call else max(1, number // 10)).to_bytes(8, "big"),
                    name=conventions.SPAN_LLM if call else "look",
                    start_time_unix_nano=start + number * 10**6,
                    end_time_unix_nano=start + number * 10**6 + 5 * 10**5,
                    attributes=attributes(content),
                )
            )
        headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
        answer = web.call("POST", "/v1/traces", request.SerializeToString(), headers)
        assert answer.status == 200, answer
    return Large(ids[conventions.ROLLOUT_ID], ids[conventions.ATTEMPT_ID], trace_id.hex())


def test_an_outline_is_paged(web: Web, large: Large) -> None:
    path, asked = f"/rollouts/{large.rollout_id}", {"attempt_id": large.attempt_id}
    first = web.rest("GET", f"{path}/outline", asked).json
    assert (len(first["spans"]), first["total"]) == (OUTLINE_SPANS, SPANS)
    last = web.rest("GET", f"{path}/outline", {**asked, "offset": SPANS - 7}).json
    assert ([int(each["span_id"], 16) for each in last["spans"]], last["total"]) == ([*range(SPANS - 6, SPANS + 1)], SPANS)
    assert web.rest("GET", f"{path}/outline", {"limit": READ_SPANS + 1}).status == 400
    [figures] = web.rest("GET", f"{path}/figures").json
    assert (figures["spans"], figures["calls"]) == (SPANS, CALLS), "counts are of all spans"
    [span] = web.rest("GET", "/spans", {"rollout_id": large.rollout_id, "span_id": f"{SPANS:016x}"}).json["items"]
    assert span["attributes"]["result"].startswith(f"{SPANS} ")


def test_all_spans_are_streamed_in_one_response(web: Web, large: Large) -> None:
    with urllib.request.urlopen(f"{web.url}/v1/agl/spans?rollout_id={large.rollout_id}&sort_by=span_id", timeout=300) as answer:
        assert answer.headers["Content-Length"] is None
        beginning = answer.read(1000)
        assert web.rest("GET", "/health").status == 200, "other requests are served while the response is unread"
        found = json.loads(beginning + answer.read())
    assert [int(each["span_id"], 16) for each in found.pop("items")] == [*range(1, SPANS + 1)]
    assert found == {"limit": -1, "offset": 0, "total": SPANS}


def test_a_conversation_reads_the_first_spans_and_counts_the_rest(web: Web, large: Large) -> None:
    path, asked = f"/rollouts/{large.rollout_id}", {"attempt_id": large.attempt_id}
    conversation = web.rest("GET", f"{path}/conversation", {**asked, "limit": 3}).json
    assert [call["reply"][0]["content"] for call in conversation["calls"]] == ["answer 1", "answer 2", "answer 3"]
    assert (conversation["total"], conversation["spans_left_out"]) == (CALLS * OUTLINE_SPANS // SPANS, SPANS - OUTLINE_SPANS)
    tokens = web.rest("GET", f"{path}/tokens", {**asked, "span_id": f"{STEP + STEP // 2:016x}"})
    assert tokens.json["response_token_ids"] == [4, 2], tokens
    late = web.rest("GET", f"{path}/tokens", {**asked, "span_id": f"{SPANS - STEP // 2:016x}"})
    assert late.status == 404 and f"first {OUTLINE_SPANS} spans" in late.json["detail"] and "agl-otel export" in late.json["detail"], late


def test_jaeger_ports_return_the_first_spans_with_a_warning_during_ingest(web: Web, large: Large) -> None:
    addresses = (f"/api/traces/{large.trace_id}", f"/api/v3/traces/{large.trace_id}", "/api/traces?service=a-long-day&lookback=30d")
    with ThreadPoolExecutor(len(addresses) + 1) as threads, grpc.insecure_channel(web.jaeger) as channel:
        asked = [threads.submit(web.call, "GET", address) for address in addresses]
        wanted = pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=bytes.fromhex(large.trace_id))])
        streamed = threads.submit(traces, channel, "GetTraces", wanted)
        headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
        body = span_request([("ro-meanwhile", "at-1")], spans=10).SerializeToString()
        assert web.call("POST", "/v1/traces", body, headers).status == 200
        old, new, found = (each.result() for each in asked)
        parts = streamed.result()
    assert (len(old.json["data"][0]["spans"]), old.json["data"][0]["warnings"]) == (TRACE_SPANS, [LEFT_OUT])
    assert new.status == 200 and new.body.count(b'"spanId"') == TRACE_SPANS
    assert [len(trace["spans"]) for trace in found.json["data"]] == [TRACE_SPANS]
    assert sum(len(spans_of(part)) for part in parts) == TRACE_SPANS and max(part.ByteSize() for part in parts) < 4 << 20
    assert web.rest("GET", "/rollouts/ro-meanwhile/outline").json["total"] == 10


def talk(web: Web, calls: int) -> str:
    """Store a rollout whose calls go on from one another, each with a question of its own; answers its id."""
    begun = web.rest("POST", "/rollouts", {"input": "a long talk"}).json
    ids = {conventions.ROLLOUT_ID: begun["rollout_id"], conventions.ATTEMPT_ID: begun["attempt"]["attempt_id"]}
    request, start = ExportTraceServiceRequest(), time.time_ns() - 10**12
    group = request.resource_spans.add()
    group.resource.attributes.extend(attributes(ids))
    for call in range(1, calls + 1):
        prefix = {conventions.LLM_MESSAGES_CALL: call - 1, conventions.LLM_MESSAGES_BEFORE: call - 1} if call > 1 else {}
        content = {
            "gen_ai.input.messages": message_json("user", f"question {call}."),
            conventions.LLM_CALL: call,
            conventions.PROCESS: "p",
            "gen_ai.request.model": "m",
            **prefix,
        }
        span = group.scope_spans.add().spans.add(name=conventions.SPAN_LLM, attributes=attributes(content))
        span.trace_id, span.span_id = os.urandom(16), os.urandom(8)
        span.start_time_unix_nano = start + call * 10**6
        span.end_time_unix_nano = span.start_time_unix_nano + 1
    headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
    assert web.call("POST", "/v1/traces", request.SerializeToString(), headers).status == 200
    return begun["rollout_id"]


def test_pages_of_a_large_rollout_in_a_browser(web: Web, large: Large) -> None:
    given = {"url": web.url, "rollout": large.rollout_id, "left_out": f"{SPANS - OUTLINE_SPANS:,}", "talk": talk(web, 60)}
    given |= {
        "first": f"spans 1 to {OUTLINE_SPANS:,} of {SPANS:,}",
        "next": f"spans {OUTLINE_SPANS + 1:,} to {2 * OUTLINE_SPANS:,} of {SPANS:,}",
    }
    look("look_large.py", given, seconds=400)
