"""Agents, workflows, plans, retrievals and memory by OpenTelemetry's conventions: what they are called where a rollout is shown."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rich.console import Console

from agl_otel.adapters.tree import TraceTree
from agl_otel.cli.render import span_trees
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from tests.unit.adapters.spans import key_values

Json = dict[str, Any]
CASES = json.loads((Path(__file__).parents[3] / "collector" / "conformance" / "gen_ai" / "conventions.json").read_text())["operations"]
CALL = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "small", conventions.LLM_CALL: 1, "gen_ai.response.id": "resp-1"}
TOKENS = {conventions.LLM_PROMPT_TOKEN_IDS: [1, 2], conventions.LLM_RESPONSE_TOKEN_IDS: [3], conventions.LLM_RESPONSE_LOGPROBS: [-0.5]}


def request_of(case: Json, ids: Json) -> bytes:
    """An agent `lead`, below it the case's span, and below that a model call as our proxy records it."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(key_values(ids))
    now = time.time_ns()
    own = {"name": case["span"]["name"], "kind": case["span"].get("kind", 1), "attributes": case["span"]["attributes"]}
    lead = {"name": "lead", "kind": 1, "attributes": {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "lead"}}
    call = {"name": conventions.SPAN_LLM, "kind": 3, "attributes": {**CALL, **TOKENS}}
    made: list[Json] = [lead, own, call]
    for place, each in enumerate(made):
        parent = place.to_bytes(8) if place else b""
        span = group.scope_spans[0].spans.add() if place else group.scope_spans.add().spans.add()
        span.trace_id, span.span_id, span.parent_span_id = b"\x01" * 16, (place + 1).to_bytes(8), parent
        span.name, span.kind = each["name"], each["kind"]
        span.start_time_unix_nano, span.end_time_unix_nano = now + place, now + 10**6 - place
        span.attributes.extend(key_values(each["attributes"]))
    return request.SerializeToString()


@pytest.mark.parametrize("case", [pytest.param(each, id=each["name"]) for each in CASES])
async def test_an_operation_names_an_agent_or_a_tool_and_is_no_call(store: LightningStore, begun: AttemptedRollout, case: Json) -> None:
    await store.open()
    ids = {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id}
    headers = {"Content-Type": "application/x-protobuf"}
    url = f"{store.description.collector_http}/v1/traces"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=request_of(case, ids)) as answer:
        assert answer.status == 200, await answer.text()
    wanted = {"shown": ["", ""], **case["read"]}
    spans = await store.spans(begun.rollout_id)
    found = {span.name: span for span in (await store.reader.outline(begun.rollout_id, limit=10))[0]}
    own, call = found[case["span"]["name"]], found[conventions.SPAN_LLM]
    assert {"is_agent": own.is_agent, "agent": own.agent, "tool": own.tool} == {key: wanted[key] for key in ("is_agent", "agent", "tool")}
    assert call.within == ""
    (traces_agent,) = (await store.traces([begun.rollout_id], deadline_seconds=0)).calls.agent
    tree = TraceTree.from_spans(spans)
    (of_tree,) = [each.agent for each in tree.find_llm_calls()]
    assert (traces_agent, of_tree) == ((wanted["agent"] or "lead"),) * 2
    out = StringIO()
    for shown in span_trees(spans):
        Console(file=out, width=300, color_system=None).print(shown)
    (line,) = [each for each in out.getvalue().splitlines() if case["span"]["name"] in each]
    for arrow, text in zip("←→", wanted["shown"], strict=True):
        assert (f"{arrow} {text}" in line) if text else (arrow not in line)
