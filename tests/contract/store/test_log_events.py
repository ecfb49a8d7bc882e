"""Messages that an instrumentation sent as log records are found by adapters: real recordings, through the collector and back."""

from __future__ import annotations

import time

import aiohttp
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from agl_otel.adapters import to_messages
from agl_otel.spans.log_records import with_records
from agl_otel.spans.rewards import find_final_reward
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from tests.unit.adapters.spans import key_values, recorded


@pytest.mark.parametrize("name", ["gen_ai_events", "gen_ai_details"])
async def test_messages_in_log_records_are_read_with_the_spans(store: LightningStore, begun: AttemptedRollout, name: str) -> None:
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    spans, records = recorded(name)
    now = time.time()
    own = {"rollout_id": ids[0], "attempt_id": ids[1], "start_time": now, "end_time": now}
    await store.add_many_spans([span.model_copy(update=own) for span in spans])
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_values({conventions.ROLLOUT_ID: ids[0], conventions.ATTEMPT_ID: ids[1]}))
    made = group.scope_logs.add().log_records
    for place, record in enumerate(records):
        one = made.add(
            trace_id=bytes.fromhex(record["trace_id"]),
            span_id=bytes.fromhex(record["span_id"]),
            time_unix_nano=time.time_ns() + place,
            attributes=key_values(record["attributes"]),
        )
        one.event_name = record["event_name"] if name == "gen_ai_details" else ""  # older SDKs have it among the attributes
        (body,) = key_values({"body": record["body"]})
        one.body.CopyFrom(body.value)
    url = f"{store.description.collector_http}/v1/logs"
    async with aiohttp.ClientSession() as session:
        for _ in range(2):  # an SDK's retry changes nothing
            async with session.post(url, data=request.SerializeToString(), headers={"Content-Type": "application/x-protobuf"}) as answer:
                assert answer.status == 200, await answer.text()
    expected = to_messages(with_records(spans, records))
    assert len(expected) == 3
    assert to_messages(await store.spans(ids[0])) == expected
    assert to_messages(list(await store.query_spans(*ids))) == expected


async def test_an_attempt_of_evaluations_alone_has_a_reward(store: LightningStore, begun: AttemptedRollout) -> None:
    """Its agent emits no spans; a judge logs what it thinks of it."""
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.open()
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_values({conventions.ROLLOUT_ID: ids[0], conventions.ATTEMPT_ID: ids[1]}))
    one = group.scope_logs.add().log_records.add(time_unix_nano=time.time_ns(), event_name=conventions.EVALUATION)
    one.attributes.extend(key_values({conventions.EVALUATION_SCORE: 0.5, conventions.EVALUATION_NAME: "judge"}))
    async with aiohttp.ClientSession(headers={"Content-Type": "application/x-protobuf"}) as session:
        url = f"{store.description.collector_http}/v1/logs"
        async with session.post(url, data=request.SerializeToString()) as answer:
            assert answer.status == 200, await answer.text()
    found = (await store.spans(ids[0]), await store.spans(ids[0], attempt_id=ids[1]), await store.query_spans(*ids))
    (figures,) = await store.reader.figures([begun.attempt])
    for spans in found:
        assert find_final_reward(list(spans)) == figures.reward == 0.5
    assert (figures.spans, await store.spans(ids[0], attempt_id="another")) == (0, [])
    assert list(await store.query_spans(*ids, name="chat")) == [], "a filter that matches nothing"
