"""The OpenTelemetry Collector built with our processor, between real senders, the real queue and a real ClickHouse server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from agl_otel.collector import identify, otlpjson, scan
from agl_otel.errors import DataError, UnavailableError
from agl_otel.net.front import HTTP2_PREFACE
from agl_otel.queue.updates import AttemptUpdate
from agl_otel.spans.log_records import with_evaluations, with_records
from agl_otel.types import Attempt, EnqueueRolloutRequest
from agl_otel_hook import conventions
from agl_otel_hook.varint import varint
from tests.clickhouse_server import ClickHouseServer
from tests.contract.collector.otlp import request_of, span, span_request
from tests.contract.collector.stack import until
from tests.contract.store import test_conventions as conventions_of_ai
from tests.contract.store import test_operations as operations_of_ai
from tests.system.otelcol_process import CONFIGS, Otelcol, World, binary, post
from tests.system.test_doors import ANSWERS, DOORS, PLACES, SHOWING, TOKEN, VISITORS, found_at

pytestmark = pytest.mark.full
KILLED_AFTER_SPANS = 1500
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SENDERS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    binary()
    with ClickHouseServer(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
async def world(server: ClickHouseServer, tmp_path: Path) -> AsyncIterator[World]:
    """A queue and empty tables; no collector yet."""
    made = World(tmp_path, server)
    try:
        await asyncio.to_thread(made.fresh_schema)
        await made.start_queue()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(config: Path) -> None:
    done = subprocess.run([binary(), "validate", "--config", config], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


async def test_spans_of_the_sdk_arrive_with_ids_and_numbers(world: World) -> None:
    collector = await world.collector()
    resource = Resource({conventions.ROLLOUT_ID: "ro-sdk", conventions.ATTEMPT_ID: "at-1", "service.name": "agent"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector.grpc, insecure=True)))
    tracer = provider.get_tracer("test")
    for number in range(20):
        with tracer.start_as_current_span("outer", attributes={"number": number, "ids": [1, 2, 3]}), tracer.start_as_current_span("inner"):
            pass
    assert await asyncio.to_thread(provider.force_flush, 20_000)
    provider.shutdown()
    async with world.reader(collector) as reader:
        spans = await reader.spans(["ro-sdk"])
    assert [found.sequence_id for found in spans] == list(range(1, 41))
    assert {(found.rollout_id, found.attempt_id) for found in spans} == {("ro-sdk", "at-1")}
    outer = {found.span_id for found in spans if found.name == "outer"}
    assert {found.parent_id for found in spans if found.name == "inner"} == outer


async def test_ids_come_from_headers_from_the_trace_and_from_parents(world: World) -> None:
    collector = await world.collector()
    trace = os.urandom(16)
    root = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: "ro-t", conventions.ATTEMPT_ID: "at-t"}, trace=trace)
    parent = span("parent", {conventions.ROLLOUT_ID: "ro-p"})
    async with aiohttp.ClientSession() as session:
        for request, headers in (
            (request_of([span()]), {conventions.HEADER_ROLLOUT_ID: "ro-h", conventions.HEADER_ATTEMPT_ID: "at-h"}),
            (request_of([root, parent]), {}),
            (request_of([span("child", trace=trace), span("child", trace=parent.trace_id, parent=parent.span_id), span("stray")]), {}),
        ):
            assert (await post(session, collector, request, **headers)).status == 200
    async with world.reader(collector) as reader:
        rows = await reader.query("SELECT SpanName, RolloutId, AttemptId, SequenceId FROM otel.otel_traces")
    assert sorted((row["SpanName"], row["RolloutId"], row["AttemptId"], int(row["SequenceId"])) for row in rows) == [
        (conventions.SPAN_ATTEMPT, "ro-t", "at-t", 1), ("child", "ro-p", "", 2), ("child", "ro-t", "at-t", 2), ("parent", "ro-p", "", 1),
        ("stray", "", "", 0), ("work", "ro-h", "at-h", 1),
    ]  # fmt: skip


AGENT = """
import json, sys
from agl_otel_hook.emit import emit_reward
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import attempt_scope

endpoint, rollout_id, attempt_id = sys.argv[1:]
telemetry = Telemetry.start(otlp_endpoint=endpoint, service_name="agent")
with attempt_scope(rollout_id, attempt_id, traceparent=telemetry.attempt_span(rollout_id, attempt_id)):
    with telemetry.tracer("agent").start_as_current_span("think"):
        emit_reward(0.75)
print(json.dumps(telemetry.seal([(rollout_id, attempt_id)])[rollout_id, attempt_id]))
telemetry.shutdown()
"""


async def test_an_attempt_becomes_running_and_its_seal_makes_it_complete(world: World) -> None:
    collector = await world.collector()
    async with world.client() as queue, world.reader(collector) as reader:
        (rollout,) = await queue.start([EnqueueRolloutRequest(input={"question": 1})], worker_id="w")
        attempt_id = rollout.attempt.attempt_id
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", AGENT, collector.grpc, rollout.rollout_id, attempt_id],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        await until(lambda: queue.query_attempts([rollout.rollout_id]), lambda found: found.items[0].status == "running")
        seals = json.loads(done.stdout)
        update = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=attempt_id, status="succeeded", seals=seals)
        (attempt,) = await queue.update_attempts([update])
        traces = await reader.traces([rollout], [attempt])
        assert traces.verdicts[rollout.rollout_id, attempt_id].kind == "complete"
        assert [reward.value for reward in traces.rewards[rollout.rollout_id, attempt_id]] == [0.75]


async def test_a_durable_gateway_has_no_barrier_and_the_reader_polls_until_complete(world: World) -> None:
    """An ack of gateway-durable.yaml means on disk, not visible: it registers no address for barriers, and the seal decides."""
    spool = str(world.directory / "spool")
    addresses = {"AGL_OTELCOL_ANNOUNCE_GRPC": "127.0.0.1:1", "AGL_OTELCOL_ANNOUNCE_CLICKHOUSE": world.sql}
    collector = await world.collector("gateway-durable", AGL_OTELCOL_SPOOL=spool, AGL_OTELCOL_FLUSH="2s", **addresses)
    async with world.client() as queue, world.reader() as reader:
        described = await until(queue.describe, lambda found: found.collector_grpc is not None)
        assert described.collectors == []
        (rollout,) = await queue.start([EnqueueRolloutRequest(input={"question": 1})], worker_id="w")
        attempt_id = rollout.attempt.attempt_id
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", AGENT, collector.grpc, rollout.rollout_id, attempt_id],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        update = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=attempt_id, status="succeeded", seals=json.loads(done.stdout))
        (attempt,) = await queue.update_attempts([update])
        traces = await reader.traces([rollout], [attempt], deadline_seconds=40)
        assert traces.verdicts[rollout.rollout_id, attempt_id].kind == "complete"
        async with aiohttp.ClientSession() as session, session.post(f"{collector.http}/barrier") as response:
            assert response.status == 404


async def test_a_refused_span_is_kept_without_ids_with_a_reason_and_counted(world: World) -> None:
    collector = await world.collector()
    early, broken, good = span("early"), span("broken", {conventions.ROLLOUT_ID: "ro/1"}), span("good")
    early.start_time_unix_nano = 5
    early.events.add(time_unix_nano=2**63, name="event")
    async with aiohttp.ClientSession() as session:
        request = request_of([early, broken, good], {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1"})
        assert (await post(session, collector, request)).status == 200
        async with session.get(collector.metrics) as response:
            metrics = await response.text()
    async with world.reader(collector) as reader:
        sql = f"SELECT *, SpanAttributes['{conventions.INVALID}'] AS Invalid, abs(dateDiff('second', Timestamp, now())) AS Age"
        rows = {row["SpanName"]: row for row in await reader.query(f"{sql} FROM otel.otel_traces")}
    assert {name: (row["RolloutId"], row["AttemptId"], int(row["SequenceId"])) for name, row in rows.items()} == {
        "early": ("", "", 0), "broken": ("", "", 0), "good": ("ro-1", "at-1", 1),
    }  # fmt: skip
    assert "timestamp before 2000" in rows["early"]["Invalid"]
    assert "rollout id breaks the rule" in rows["broken"]["Invalid"]
    assert int(rows["early"]["Age"]) < 3600
    counted = [line for line in metrics.splitlines() if line.startswith("otelcol_processor_agentlightning_invalid")]
    assert {line.rpartition(" ")[2] for line in counted} == {"1"}
    assert all(any(f'reason="{reason}"' in line for line in counted) for reason in ("timestamp", "rollout_id"))


def field(number: int, content: bytes) -> bytes:
    """Encode a field that Python's protobuf cannot (it rejects deeply nested messages)."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def nested(levels: int) -> bytes:
    """Encode a kvlist in a kvlist, `levels` deep."""
    value = field(1, b"deep")
    for _ in range(levels):
        value = field(6, field(1, field(1, b"k") + field(2, value)))
    return value


def nested_json(levels: int) -> dict[str, Any]:
    """Like `nested`, as OTLP/JSON."""
    value: dict[str, Any] = {"stringValue": "deep"}
    for _ in range(levels):
        value = {"kvlistValue": {"values": [{"key": "k", "value": value}]}}
    return value


@pytest.mark.parametrize("road", ["http", "gzip", "grpc", "json"])
async def test_a_bad_span_is_refused_alone(world: World, road: str) -> None:
    collector = await world.collector()
    short = span("short")
    short.trace_id = b"\1\2\3"
    spans = [span("good"), short, span("deep"), span("BAD!"), span("good")]
    request = request_of(spans, {conventions.ROLLOUT_ID: "ro-1"})
    bad = b"\xffad\xfe"
    texts = [each.SerializeToString().replace(b"BAD!", bad) for each in spans]
    texts[2] += field(9, field(1, b"deep") + field(2, nested(90)))
    resource = field(1, request.resource_spans[0].resource.SerializeToString())
    raw = field(1, resource + field(2, b"".join(field(2, each) for each in texts)))
    async with aiohttp.ClientSession() as session:
        if road == "grpc":
            async with grpc.aio.insecure_channel(collector.grpc) as channel:
                export = channel.unary_unary(EXPORT, request_serializer=bytes, response_deserializer=bytes)
                await export(raw, timeout=60)
        elif road == "json":
            document = otlp_json(request)
            document["resourceSpans"][0]["scopeSpans"][0]["spans"][2]["attributes"].append({"key": "deep", "value": nested_json(90)})
            body = json.dumps(document).encode().replace(b"BAD!", b"\\ud800ad\\udfff")
            assert (await post(session, collector, body, Content_Type="application/json")).status == 200
        elif road == "gzip":
            assert (await post(session, collector, gzip.compress(raw), Content_Encoding="gzip")).status == 200
        else:
            assert (await post(session, collector, raw)).status == 200
    async with world.reader(collector) as reader:
        assert [found.name for found in await reader.spans(["ro-1"])] == ["good", "good"]
        sql = f"SELECT SpanName, RolloutId, SpanAttributes['{conventions.INVALID}'] AS Invalid FROM otel.otel_traces WHERE Invalid != ''"
        rows = await reader.query(sql)
    refused = {"short": scan.TRACE_ID, "deep": "attributes are nested too deeply", "\ufffdad\ufffd": "text is no UTF-8"}
    assert {row["SpanName"]: row["Invalid"] for row in rows} == refused
    assert {row["RolloutId"] for row in rows} == {""}


def otlp_json(request: ExportTraceServiceRequest) -> dict[str, Any]:
    """Convert a request to OTLP/JSON: ids in hex."""
    document = MessageToDict(request)
    sent_spans = request.resource_spans[0].scope_spans[0].spans
    for one, sent in zip(document["resourceSpans"][0]["scopeSpans"][0]["spans"], sent_spans, strict=True):
        one |= {"traceId": sent.trace_id.hex(), "spanId": sent.span_id.hex()}
    return document


async def test_values_are_stored_as_the_texts_of_the_golden_vectors(world: World) -> None:
    vectors = json.loads((CONFIGS.parents[1] / "collector" / "conformance" / "values" / "values.json").read_text())["vectors"]
    sent = span("work", {conventions.ROLLOUT_ID: "ro-1"})
    for vector in vectors:
        sent.attributes.append(KeyValue(key=vector["name"], value=ParseDict(vector["value"], AnyValue())))
    request = request_of([sent])
    collector = await world.collector()
    async with aiohttp.ClientSession() as session:
        assert (await post(session, collector, request)).status == 200
        as_json = json.dumps(otlp_json(request)).encode()
        assert (await post(session, collector, as_json, Content_Type="application/json")).status == 200
    async with world.reader(collector) as reader:
        rows = await reader.query("SELECT SpanAttributes FROM otel.otel_traces")
    assert len(rows) == 2
    for row in rows:
        texts = dict(row["SpanAttributes"])
        assert {vector["name"]: texts[vector["name"]] for vector in vectors} == {vector["name"]: vector["text"] for vector in vectors}


async def test_cases_of_the_conventions_are_read_like_from_the_python_collector(world: World) -> None:
    collector = await world.collector()
    played = [play.values for play in conventions_of_ai.plays()]
    async with aiohttp.ClientSession(headers={"Content-Type": "application/x-protobuf"}) as session:
        for number, (vector, form) in enumerate(played):
            for sent, request in conventions_of_ai.requests_of(vector, f"ro-{number}", "at-1", form):
                async with session.post(f"{collector.http}/v1/{sent}", data=request) as answer:
                    assert answer.status == 200, await answer.text()
    async with world.reader(collector) as reader:
        await reader.barrier()
        for number, (vector, form) in enumerate(played):
            ids = [f"ro-{number}"]
            spans = with_records(await reader.spans(ids), await reader.events(ids))
            (read,) = with_evaluations(spans, await reader.evaluations(ids), whole=True)
            of = Attempt(rollout_id=ids[0], attempt_id="at-1", sequence_id=1, start_time=0.0)
            found = conventions_of_ai.as_read(read, (await reader.figures([of]))[0])
            assert {key: found[key] for key in vector["read"]} == vector["read"], (vector["name"], form)


async def test_operations_of_the_conventions_are_shown_like_from_the_python_collector(world: World) -> None:
    collector = await world.collector()
    async with aiohttp.ClientSession(headers={"Content-Type": "application/x-protobuf"}) as session:
        for number, case in enumerate(operations_of_ai.CASES):
            request = operations_of_ai.request_of(case, {conventions.ROLLOUT_ID: f"ro-{number}", conventions.ATTEMPT_ID: "at-1"})
            async with session.post(f"{collector.http}/v1/traces", data=request) as answer:
                assert answer.status == 200, await answer.text()
    async with world.reader(collector) as reader:
        await reader.barrier()
        for number, case in enumerate(operations_of_ai.CASES):
            outline, _ = await reader.outline(f"ro-{number}", limit=10)
            (own,) = [each for each in outline if each.name == case["span"]["name"]]
            wanted = {name: case["read"][name] for name in ("is_agent", "agent", "tool")}
            assert {name: getattr(own, name) for name in wanted} == wanted, case["name"]


async def test_infinite_numbers_and_repeated_keys_in_values_are_stored_like_in_python(world: World) -> None:
    collector = await world.collector()
    sent = span(
        "work", {conventions.ROLLOUT_ID: "ro-1", "list": [0.5, math.nan, math.inf, -math.inf, -0.0], "alone": math.nan, "again": "first"}
    )
    pairs = [KeyValue(key="a", value=AnyValue(int_value=2**53 + 1)), KeyValue(key="a", value=AnyValue(int_value=2))]
    pairs.append(KeyValue(key="x", value=AnyValue(double_value=math.nan)))
    sent.attributes.append(KeyValue(key="map", value=AnyValue(kvlist_value=KeyValueList(values=pairs))))
    sent.attributes.append(KeyValue(key="again", value=AnyValue(string_value="second")))
    sent.attributes.append(KeyValue(key=conventions.ROLLOUT_ID, value=AnyValue(string_value="ro-2")))
    async with aiohttp.ClientSession() as session:
        assert (await post(session, collector, request_of([sent]))).status == 200
        async with session.get(collector.metrics) as response:
            metrics = await response.text()
    async with world.reader(collector) as reader:
        (row,) = await reader.query("SELECT RolloutId, SpanAttributes, length(mapKeys(SpanAttributes)) AS Keys FROM otel.otel_traces")
    attributes = dict(row["SpanAttributes"])
    assert (row["RolloutId"], attributes["again"], int(row["Keys"])) == ("ro-1", "first", len(attributes))
    assert (attributes["list"], attributes["alone"]) == ('[0.5,"NaN","Infinity","-Infinity",-0]', "NaN")
    assert attributes["map"] == '{"a":9007199254740993,"x":"NaN"}'
    assert [line.rpartition(" ")[2] for line in metrics.splitlines() if "agentlightning_repeated_keys" in line and line[0] != "#"] == ["3"]


async def test_a_key_of_an_attempt_stores_only_that_attempts_data(world: World) -> None:
    await world.end_queue()
    world.token = "secret"
    await world.start_queue()
    collector = await world.collector()
    vectors = json.loads((CONFIGS.parents[1] / "collector" / "conformance" / "keys" / "keys.json").read_text())
    key = next(each for each in vectors["keys"] if (each["token"], each["rollout"], each["attempt"]) == ("secret", "ro-1", "at-1"))["key"]
    bound = f"Bearer {key}"
    others = {conventions.ROLLOUT_ID: "ro-2", conventions.ATTEMPT_ID: "at-1"}
    raw = request_of([span("mine"), span("other", others), span("own", {conventions.ROLLOUT_ID: "ro-1"})]).SerializeToString()
    rejection = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=1, error_message=f"1 × {identify.KEY}"))
    async with aiohttp.ClientSession() as session:

        async def answer(signal: str, body: bytes, authorization: str) -> bytes:
            headers = {"Content-Type": "application/x-protobuf", "authorization": authorization}
            async with session.post(f"{collector.http}/v1/{signal}", data=body, headers=headers, raise_for_status=True) as response:
                return await response.read()

        assert (await post(session, collector, raw, authorization=f"{bound}x")).status == 401
        assert ExportTraceServiceResponse.FromString(await answer("traces", raw, bound)) == rejection
        for sent, reason in ((metrics_request("load", ids=others), identify.KEY), (metrics_request("load", "agl.training.drift"), "")):
            partial = ExportMetricsServiceResponse.FromString(await answer("metrics", sent, bound)).partial_success
            assert partial.rejected_data_points == 1 and reason in partial.error_message
        assert await answer("metrics", metrics_request("agl.training.drift"), "Bearer secret") == b""
        async with session.get(collector.metrics) as response:
            metrics = await response.text()
    async with grpc.aio.insecure_channel(collector.grpc) as channel:
        export = channel.unary_unary(EXPORT, request_serializer=bytes, response_deserializer=ExportTraceServiceResponse.FromString)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await export(raw, timeout=60, metadata=[("authorization", f"{bound}x")])
        mixed = request_of([span("grpc"), span("other", others)]).SerializeToString()
        assert await export(mixed, timeout=60, metadata=[("authorization", bound)]) == rejection
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with world.reader(collector) as reader:
        rows = await reader.query("SELECT SpanName, RolloutId, AttemptId FROM otel.otel_traces")
        points = await reader.query("SELECT MetricName, RolloutId, AttemptId FROM otel.otel_metrics_gauge ORDER BY MetricName")
    assert {row["SpanName"]: (row["RolloutId"], row["AttemptId"]) for row in rows} == dict.fromkeys(
        ("mine", "own", "grpc"), ("ro-1", "at-1")
    )
    assert [tuple(row.values()) for row in points] == [("agl.training.drift", "", ""), ("load", "ro-1", "at-1")]
    counted = {line.partition("{")[2] for line in metrics.splitlines() if line.startswith("otelcol_processor_agentlightning_invalid")}
    for reason, of in (("key", "traces"), ("key", "metrics"), ("training", "metrics")):
        assert any(f'reason="{reason}"' in line and f'signal="{of}"' in line and line.endswith(" 1") for line in counted), counted


def metrics_request(*names: str, ids: Mapping[str, str] | None = None) -> bytes:
    """Build a request with a gauge of one point for each name."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    for key, value in (ids or {}).items():
        group.resource.attributes.add(key=key).value.string_value = value
    metrics = group.scope_metrics.add().metrics
    for name in names:
        metrics.add(name=name).gauge.data_points.add(time_unix_nano=time.time_ns(), as_double=1.0)
    return request.SerializeToString()


async def test_compressed_bodies_are_limited_and_other_origins_refused(world: World) -> None:
    collector = await world.collector()
    async with aiohttp.ClientSession() as session:
        many = gzip.compress(b"") * 2_000
        assert (await post(session, collector, many, Content_Encoding="gzip")).status == 400
        assert (await post(session, collector, gzip.compress(bytes(65 << 20)), Content_Encoding="gzip")).status == 413
        assert (await post(session, collector, b"x", Content_Encoding="br")).status == 415
        assert (await post(session, collector, request_of([span()]), Host="evil.example")).status == 403
        assert (await post(session, collector, request_of([span()]), Origin="http://evil.example")).status == 403
        async with session.post(f"{collector.http}/v1/traces/v1/traces") as response:
            assert (response.status, "without /v1/traces, which SDKs add" in await response.text()) == (404, True)
    reader, writer = await asyncio.open_connection(*collector.http.removeprefix("http://").split(":"))
    writer.write(HTTP2_PREFACE)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and f"gRPC is at {collector.grpc} (AGL_OTLP_GRPC_PORT)".encode() in answer, answer


async def test_each_refused_request_is_answered_like_by_the_python_collector_and_counted(world: World) -> None:
    await world.end_queue()
    world.token = "secret"
    await world.start_queue()
    collector = await world.collector(AGL_MAX_MESSAGE_BYTES="100000")
    right, as_json = {"authorization": "Bearer secret"}, {"authorization": "Bearer secret", "Content_Type": "application/json"}
    good, large = request_of([span()]).SerializeToString(), bytes(100_001)
    of_logs = b'{"resourceLogs": [{"scopeLogs": []}]}'
    with pytest.raises(DataError) as other_signal:
        otlpjson.to_protobuf(ExportTraceServiceRequest, of_logs)
    unknown_level = "there is no ack level 'Stored': agl-ack is durable (as without it) or stored"
    async with aiohttp.ClientSession() as session:
        for body, headers, status, words in (
            (of_logs, as_json, 400, str(other_signal.value)),
            (b"{", as_json, 400, ""),
            (b"\xff", right, 400, ""),
            (good, {**right, conventions.HEADER_ACK: "Stored"}, 400, unknown_level),
            (b"\x0a\x00" * 20_000, right, 400, "send smaller batches"),
            (good, {}, 401, "no token was sent"),
            (good, {**right, "Origin": "http://evil.example"}, 403, "may not call"),
            (large, right, 413, ""),
            (good, {**right, "Content_Encoding": "br"}, 415, "Content-Encoding"),
            (good, {**right, "Content_Type": "text/xml"}, 415, "unsupported media type"),
            (b'{"resourceLogs": [], "another": [{}]}', as_json, 200, ""),
            (good, {**right, conventions.HEADER_ACK: "stored"}, 200, ""),
        ):
            answer = await post(session, collector, body, **headers)
            assert (answer.status, words in await answer.text(errors="replace")) == (status, True), (await answer.read(), words)
        async with session.post(f"{collector.http}/v1/trace", data=good, headers=right) as response:
            assert response.status == 404
        async with grpc.aio.insecure_channel(collector.grpc) as channel:
            for method, sent, metadata, code in (
                (EXPORT, good, (), "UNAUTHENTICATED"),
                (EXPORT, good, (*right.items(), (conventions.HEADER_ACK, "Stored")), "INVALID_ARGUMENT"),
                (EXPORT, b"\xff", tuple(right.items()), "INVALID_ARGUMENT"),
                (EXPORT, large, tuple(right.items()), "RESOURCE_EXHAUSTED"),
                ("/no.Such/Method", good, tuple(right.items()), "UNIMPLEMENTED"),
            ):
                call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(sent, timeout=60, metadata=metadata)
                assert refused.value.code().name == code, refused.value
                assert conventions.HEADER_ACK not in dict(metadata) or refused.value.details() == unknown_level
        await world.end_queue()
        assert (await post(session, collector, span_request([("ro-1", "at-1")], spans=1), **right)).status == 503
        async with session.get(collector.metrics) as response:
            metrics = (await response.text()).splitlines()
    lines = [line for line in metrics if line.startswith("otelcol_extension_agentlightning_refused_requests")]
    counts = {tuple(re.findall(r'(?:reason|transport)="(\w+)"', line)): int(line.rpartition(" ")[2]) for line in lines}
    assert counts == {
        ("malformed", "http"): 4, ("crowded", "http"): 1, ("unauthorized", "http"): 1, ("forbidden", "http"): 1, ("too_large", "http"): 1,
        ("encoding", "http"): 1, ("content_type", "http"): 1, ("unknown_path", "http"): 1, ("unavailable", "http"): 1,
        ("malformed", "grpc"): 2, ("unauthorized", "grpc"): 1, ("too_large", "grpc"): 1, ("unknown_path", "grpc"): 1,
    }  # fmt: skip
    warned = [line for line in collector.log.read_text().splitlines() if "refused requests" in line]
    assert len(warned) == len({reason for reason, _ in counts}), "one line a minute for each reason"


OTHERWISE = {"the token without a scheme": "401", "a token for collector": "401", "first a wrong token, then the right one": "200"}
"""Visitors who are answered otherwise than by the Python collector where a token is asked for."""


def by_visitor(answers: Mapping[str, str]) -> dict[str, str]:
    """Turn {response: visitors} of doors.json into {visitor: response}, and of a refusal only its status: the words differ."""
    each = [(name, answer) for answer, visitors in answers.items() for name in visitors.split("; ")]
    return {name: answer if answer.startswith("200") else answer[:3] for name, answer in each}


@pytest.mark.parametrize("token", ["", TOKEN], ids=["open", "token"])
async def test_visitors_over_http_are_answered_like_by_the_python_collector(token: str, world: World) -> None:
    world.token = token
    await world.end_queue()
    await world.start_queue()
    collector = await world.collector(AGL_ALLOWED_HOSTS="stack.test")
    what, ports = "with a token" if token else "without a token", {"otlp_http": collector.ports[1]}
    expected = json.loads(ANSWERS.read_text())
    for part, visitors, names in (
        (what, VISITORS, ("a span of an attempt", "a figure of training")),
        (
            f"whence, {what}",
            SHOWING if token else PLACES,
            ("a span of an attempt", "a figure of training", "barrier", "health", "no such path"),
        ),
    ):
        doors = {f"OTLP HTTP: {name}": DOORS[f"OTLP HTTP: {name}"] for name in names}
        found = await asyncio.to_thread(found_at, ports, doors, visitors)
        for name in doors:
            known = by_visitor(expected[part][name])
            known |= {each: answer for each, answer in OTHERWISE.items() if token and each in known}
            assert {each: answer for each, answer in by_visitor(found[name]).items() if each in known} == known, (part, name)


async def test_idle_connections_and_those_without_a_complete_head_are_closed(tmp_path: Path) -> None:
    binary()
    collector = Otelcol("agent", tmp_path / "log", {"AGL_OTELCOL_IDLE": "1s"})
    try:
        await collector.start()
        for first in (b"", b"POST / HT", b"POST / HTTP/1.1\r\nX-Slow: ", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", collector.ports[1])
            writer.write(first)
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()
    finally:
        collector.close()


async def test_while_the_queue_is_unavailable_senders_retry_and_nothing_is_lost(world: World) -> None:
    collector = await world.collector()
    await world.end_queue()
    async with aiohttp.ClientSession() as session:
        refused = await post(session, collector, span_request([("ro-1", "at-1")], spans=2))
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await post(session, collector, request_of([span()]))).status == 200, "spans of no rollout need no queue"
        await world.start_queue()
        await until(lambda: post(session, collector, span_request([("ro-1", "at-1")], spans=2)), lambda answer: answer.status == 200)
    async with world.reader(collector) as reader:
        first, second = [found.sequence_id for found in await reader.spans(["ro-1"])]
    assert second == first + 1  # the numbers of an abandoned try may be missing before them


async def test_the_collector_is_registered_with_the_queue_until_it_stops(world: World) -> None:
    world.token = "secret"
    await world.end_queue()
    await world.start_queue()
    collector = await world.collector()
    async with world.client() as queue:
        described = await until(queue.describe, lambda found: found.collector_grpc == collector.grpc)
        assert (described.collectors, described.clickhouse) == ([collector.http], world.sql)
        async with aiohttp.ClientSession() as session:
            request = span_request([("ro-1", "at-1")], spans=1)
            assert (await post(session, collector, request)).status == 401
            assert (await post(session, collector, request, Authorization="Bearer secret")).status == 200
            async with session.post(f"{collector.http}/barrier", headers={"Authorization": "Bearer secret"}) as response:
                assert response.status == 200
        assert await collector.end() == 0
        assert (await queue.describe()).collectors == []


async def send_until(collector: Otelcol, acked: set[str], stop: asyncio.Event, sender: int) -> None:
    """Send small requests, like agents; collect the ids of spans acked with 200 in `acked`."""
    async with aiohttp.ClientSession() as session:
        for number in range(100_000):
            request = span_request([(f"ro-{sender}", f"at-{number % 3}"), (f"ro-{sender}-{number}", "at-0")], spans=3)
            try:
                answer = await post(session, collector, request)
            except (aiohttp.ClientError, ConnectionError):
                return
            if answer.status == 200:
                acked.update(each.span_id.hex() for r in request.resource_spans for g in r.scope_spans for each in g.spans)
            if len(acked) >= KILLED_AFTER_SPANS:
                stop.set()


async def stored(world: World) -> Counter[str]:
    rows: list[dict[str, Any]] | None = None
    while rows is None:  # the server may abort meanwhile (see must_run, which fails if it does not come back)
        await asyncio.to_thread(world.server.must_run)
        with contextlib.suppress(UnavailableError):
            async with world.reader() as reader:
                rows = await reader.query("SELECT SpanId, RolloutId, SequenceId FROM otel.otel_traces")
    numbers = Counter((row["RolloutId"], row["SequenceId"]) for row in {row["SpanId"]: row for row in rows}.values())
    assert max(numbers.values(), default=1) == 1, "a sequence number was given twice"
    return Counter(row["SpanId"] for row in rows)


@pytest.mark.parametrize("config", ["all-in-one", "gateway-durable"])
async def test_no_acked_span_is_lost_by_kill_9_under_load(
    config: str, world: World, record_property: Callable[[str, object], None]
) -> None:
    collector = await world.collector(config, AGL_OTELCOL_SPOOL=str(world.directory / "spool"))
    acked: set[str] = set()
    killed_at = asyncio.Event()
    started = time.monotonic()
    senders = [asyncio.create_task(send_until(collector, acked, killed_at, number)) for number in range(SENDERS)]
    async with asyncio.timeout(300):
        await killed_at.wait()
    assert await collector.end(signal.SIGKILL) == -signal.SIGKILL
    await asyncio.gather(*senders)
    seconds = time.monotonic() - started
    await collector.start()
    if config == "gateway-durable":  # acked on disk, and stored a little later
        await until(lambda: stored(world), lambda found: not acked - found.keys())
    found = await stored(world)
    record_property("acked_spans_per_second", round(len(acked) / seconds))
    record_property("doubled", sum(times > 1 for times in found.values()))
    assert len(acked) >= KILLED_AFTER_SPANS
    assert not acked - found.keys(), "acked spans were lost"


@pytest.mark.parametrize("config", ["all-in-one", "gateway", "agent", "gateway-durable"])
async def test_a_resend_is_known_after_kill_9(config: str, world: World) -> None:
    world.token = "secret"
    await world.end_queue()
    await world.start_queue()
    spool = world.directory / "spool"
    gateway = (await world.collector("gateway", AGL_OTELCOL_RESENDS="")).grpc if config == "agent" else ""
    collector = await world.collector(config, AGL_OTELCOL_SPOOL=str(spool), AGL_OTELCOL_GATEWAY=gateway)
    authorization = "Bearer secret"
    over_http, over_grpc = (span_request([("ro-1", "at-1")], spans=2).SerializeToString() for _ in range(2))

    async def send() -> None:
        async with aiohttp.ClientSession() as session:
            assert (await post(session, collector, over_http, authorization=authorization)).status == 200
            packed = await post(session, collector, gzip.compress(over_http), authorization=authorization, Content_Encoding="gzip")
            assert packed.status == 200
        async with grpc.aio.insecure_channel(collector.grpc) as channel:
            export = channel.unary_unary(EXPORT, request_serializer=bytes, response_deserializer=bytes)
            await export(over_grpc, timeout=60, metadata=[("authorization", authorization)])

    for _ in range(2):
        await send()
        assert await collector.end(signal.SIGKILL) == -signal.SIGKILL
        await collector.start()
    await send()
    await until(lambda: stored(world), lambda found: len(found) == 4)
    # requests acked before they are stored are stored in order: none of the others is behind this one
    async with aiohttp.ClientSession() as session:
        assert (await post(session, collector, span_request([("ro-2", "at-1")], spans=1), authorization=authorization)).status == 200
    found = await until(lambda: stored(world), lambda found: len(found) == 5)
    if config != "gateway-durable":  # whose log may store a batch twice that it was about to delete
        assert set(found.values()) == {1}
    data = world.directory / "collector"
    journals = {"all-in-one": data / "otelcol", "gateway-durable": spool / "resends"}
    journal = journals.get(config, data / f"otelcol-{collector.ports[0]}")
    (kept,) = journal.iterdir()
    assert (journal.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    assert "secret" not in kept.read_text() and len(kept.read_text().splitlines()) == 3


async def test_messages_are_accepted_up_to_the_configured_size(world: World) -> None:
    collector = await world.collector(AGL_MAX_MESSAGE_BYTES="100000")
    large = request_of([span("large", {"k": "x" * 100_000})]).SerializeToString()
    async with aiohttp.ClientSession() as session:
        for body, encoding in ((large, "identity"), (gzip.compress(large), "gzip")):
            assert (await post(session, collector, body, Content_Encoding=encoding)).status in (400, 413)
        assert (await post(session, collector, request_of([span("small", {"k": "x" * 90_000})]))).status == 200
    async with grpc.aio.insecure_channel(collector.grpc) as channel:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            export = channel.unary_unary(EXPORT, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await export(large, timeout=60, compression=compression)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_configured_host_name_is_registered_and_accepted(world: World) -> None:
    collector = await world.collector(AGL_ADVERTISE="box.example")
    port = collector.ports[1]
    async with world.client() as queue:
        described = await until(queue.describe, lambda found: found.collector_grpc is not None)
        assert described.collector_grpc == f"box.example:{collector.ports[0]}"
        assert described.collectors == [f"http://box.example:{port}"]
    async with aiohttp.ClientSession() as session:
        for name, status in (("box.example", 200), ("evil.example", 403)):
            assert (await post(session, collector, request_of([span()]), Host=f"{name}:{port}")).status == status


async def test_an_agent_collector_identifies_by_headers_and_the_gateway_keeps_its_numbers(world: World) -> None:
    world.token = "secret"
    await world.end_queue()
    await world.start_queue()
    gateway = await world.collector("gateway")
    agent = await world.collector("agent", AGL_OTELCOL_GATEWAY=gateway.grpc)
    headers = {conventions.HEADER_ROLLOUT_ID: "ro-h", conventions.HEADER_ATTEMPT_ID: "at-h", "Authorization": "Bearer secret"}
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            assert (await post(session, agent, request_of([span(), span()]), **headers)).status == 200
    async with world.reader() as reader:
        spans = await reader.spans(["ro-h"])
    assert [(found.attempt_id, found.sequence_id) for found in spans] == [("at-h", number) for number in (1, 2, 3, 4)]
