"""Cases of OpenTelemetry's conventions for generative AI, through a real collector and back: events of the span and log records alike."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.spans.conversations import read_call
from agl_otel.spans.rewards import find_final_reward
from agl_otel.store import LightningStore
from agl_otel.traces.figures import AttemptFigures
from agl_otel.types import AttemptedRollout, Span
from agl_otel_hook import conventions
from tests.unit.adapters.spans import key_values

Json = dict[str, Any]
VECTORS = json.loads((Path(__file__).parents[3] / "collector" / "conformance" / "gen_ai" / "conventions.json").read_text())["vectors"]
FORMS = ("events of the span", "log records", "log records with event.name")


def plays() -> list[Any]:
    forms = [(each, form) for each in VECTORS for form in (FORMS if "events" in each else ("",))]
    return [pytest.param(each, form, id=f"{each['name']}, {form}".rstrip(", ")) for each, form in forms]


def span_request(vector: Json, ids: Json, form: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(key_values(ids))
    now = time.time_ns()
    span = group.scope_spans.add().spans.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, name=vector["span"]["name"])
    span.start_time_unix_nano, span.end_time_unix_nano = now, now + 10**6
    span.attributes.extend(key_values(vector["span"]["attributes"]))
    if form == FORMS[0]:
        for place, event in enumerate(vector["events"]):
            fields = {**event["attributes"], **event.get("body", {})}
            span.events.add(name=event["name"], time_unix_nano=now + place, attributes=key_values(fields))
    return request


def log_request(vector: Json, ids: Json, form: str) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_values(ids))
    records = group.scope_logs.add().log_records
    for place, event in enumerate(vector["events"]):
        older = {"event.name": event["name"]} if form == FORMS[2] else {}
        made = records.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, time_unix_nano=time.time_ns() + place)
        made.attributes.extend(key_values({**event["attributes"], **older}))
        made.event_name = "" if older else event["name"]
        if "body" in event:
            made.body.CopyFrom(key_values({"body": event["body"]})[0].value)
    return request


def requests_of(vector: Json, rollout_id: str, attempt_id: str, form: str) -> list[tuple[str, bytes]]:
    """Return (signal, OTLP) of a case for an attempt."""
    ids = {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id}
    logs = [("logs", log_request(vector, ids, form).SerializeToString())] if form in FORMS[1:] else []
    return [("traces", span_request(vector, ids, form).SerializeToString()), *logs]


def as_read(span: Span, figures: AttemptFigures) -> Json:
    """Return all that a case may expect."""
    call = read_call(span)
    assert call is not None
    prompt, reply, _ = call.conversation
    assert figures.reward == find_final_reward([span])
    return {
        "prompt": prompt, "reply": reply, "model": call.model, "response_id": call.response_id, "usage": [*call.usage],
        "conversation_id": "".join(figures.conversation_ids), "reward": figures.reward, "rewards": figures.rewards,
        "unread_labels": figures.unread_labels,
    }  # fmt: skip


@pytest.mark.parametrize(("vector", "form"), plays())
async def test_a_case_of_the_conventions_is_read(store: LightningStore, begun: AttemptedRollout, vector: Json, form: str) -> None:
    await store.open()
    async with aiohttp.ClientSession(headers={"Content-Type": "application/x-protobuf"}) as session:
        for signal, request in requests_of(vector, begun.rollout_id, begun.attempt.attempt_id, form):
            for _ in range(2):  # an SDK's retry changes nothing
                async with session.post(f"{store.description.collector_http}/v1/{signal}", data=request) as answer:
                    assert answer.status == 200, await answer.text()
    (span,) = await store.spans(begun.rollout_id)
    (figures,) = await store.reader.figures([begun.attempt])
    found = as_read(span, figures)
    assert {key: found[key] for key in vector["read"]} == vector["read"]
    outline, _ = await store.reader.outline(begun.rollout_id, limit=10)
    assert outline[0].rewards == figures.rewards
    traces = await store.traces([begun.rollout_id], deadline_seconds=0)
    assert {each.name: each.value for own in traces.rewards.values() for each in own} == figures.rewards
