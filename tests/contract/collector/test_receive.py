"""OTLP over gRPC and HTTP, as sent by real exporters and by careless clients."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from agl_otel.collector.unreadable import UNREADABLE
from agl_otel.traces.reader import TraceReader
from agl_otel_hook import conventions

from .otlp import post_on, post_spans, request_of, span, span_request
from .stack import Stack

PROTOBUF = {"Content-Type": "application/x-protobuf"}
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def call(channel: grpc.aio.Channel, method: str) -> Any:
    """Return a method that sends raw bytes."""
    return channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)


EXPORTERS: dict[str, Callable[[Stack], SpanExporter]] = {
    "grpc": lambda stack: GrpcSpans(endpoint=stack.grpc, insecure=True),
    "grpc-gzip": lambda stack: GrpcSpans(endpoint=stack.grpc, insecure=True, compression=grpc.Compression.Gzip),
    "http": lambda stack: HttpSpans(endpoint=f"{stack.http}/v1/traces"),
    "http-gzip": lambda stack: HttpSpans(endpoint=f"{stack.http}/v1/traces", compression=Compression.Gzip),
}


PLAIN = json.dumps({"resourceSpans": [{"scopeSpans": []}]}, indent=1).encode()


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"x", {}, 415, "application/x-protobuf or application/json, and the request has none; set OTEL"),
        (b"x", {"Content-Type": "text/xml"}, 415, "not text/xml"),
        (PLAIN, PROTOBUF, 400, "it begins like JSON: send Content-Type: application/json"),
        (gzip.compress(PLAIN, mtime=0), PROTOBUF, 400, "it begins like gzip: send Content-Encoding: gzip"),
        (gzip.compress(PLAIN, mtime=0), {"Content-Type": "application/json"}, 400, "it begins like gzip: send Content-Encoding: gzip"),
        (b"\x28\xb5\x2f\xfd\x20\x00\x01", PROTOBUF, 400, "it begins like zstd: send Content-Encoding: zstd"),
        (b"[" + b"{}," * 2000, {"Content-Type": "application/json"}, 400, "a request with more than 1024 needs 8 bytes for each"),
        (b"\x0a\x00" * 20_000, PROTOBUF, 400, "a request with more than 1024 needs 16 bytes for each"),
        (b"", PROTOBUF | {conventions.HEADER_ACK: "Stored"}, 400, "there is no ack level 'Stored': agl-ack is durable"),
        (b"", PROTOBUF | {conventions.HEADER_ACK: "durable"}, 200, ""),
    ],
)
async def test_a_refusal_names_its_cause_and_its_remedy(
    stack: Stack, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session,
        session.post(f"{stack.http}/v1/traces", data=body, headers=headers) as response,
    ):
        answer = (await response.read()).decode(errors="replace")
        assert (response.status, words in answer) == (status, True), answer


@pytest.mark.parametrize("kind", EXPORTERS)
async def test_the_sdks_exporters_deliver_every_span_with_its_values(kind: str, stack: Stack, reader: TraceReader) -> None:
    rollout = f"ro-sdk-{kind}"
    values: dict[str, Any] = {
        "s": "é\x00\n",
        "i": -(2**63),
        "d": 0.1,
        "b": False,
        "ints": [1, 2],
        "doubles": [1.0, 2.5],
        "texts": ["a", ""],
        "flags": [True],
    }

    def emit() -> None:
        resource = Resource({conventions.ROLLOUT_ID: rollout, conventions.ATTEMPT_ID: "at-1", "count": 3})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(EXPORTERS[kind](stack)))
        tracer = provider.get_tracer("scope", "1.2")
        for number in range(40):
            with tracer.start_as_current_span(f"parent-{number}", attributes=values) as parent:
                parent.add_event("happened", {"at": number})
                tracer.start_span("child", links=[]).end()
        provider.shutdown()

    await asyncio.to_thread(emit)
    await reader.barrier()
    spans = await reader.spans([rollout])
    assert sorted(found.sequence_id for found in spans) == list(range(1, 81))
    parent = next(found for found in spans if found.name == "parent-7")
    assert parent.attributes == values
    assert [type(parent.attributes[key]) for key in ("i", "d", "b")] == [int, float, bool]
    assert (parent.events[0].name, parent.events[0].attributes) == ("happened", {"at": 7})
    assert parent.resource.attributes["count"] == 3
    assert {found.parent_id for found in spans if found.name == "child"} == {found.span_id for found in spans if found.name != "child"}


async def test_logs_are_stored_with_the_ids_of_their_span(stack: Stack, reader: TraceReader) -> None:
    attempt = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: "ro-logs", conventions.ATTEMPT_ID: "at-1"})
    await post_spans(stack, request_of([attempt]))

    def emit() -> None:
        provider = LoggerProvider(resource=Resource({"service.name": "agent"}), shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(GrpcLogs(endpoint=stack.grpc, insecure=True)))
        record = LogRecord(
            timestamp=attempt.start_time_unix_nano, severity_number=SeverityNumber.WARN, severity_text="WARN", body={"said": "hi", "n": 1}
        )
        record.trace_id, record.span_id, record.event_name = int.from_bytes(attempt.trace_id), 77, "gen_ai.user.message"
        record.attributes = {"k": 1}
        provider.get_logger("log").emit(record)
        provider.shutdown()

    await asyncio.to_thread(emit)
    await reader.barrier()
    (row,) = await reader.query("SELECT * FROM otel_logs WHERE RolloutId = 'ro-logs'")
    assert (row["AttemptId"], row["SequenceId"], row["ServiceName"], row["EventName"]) == ("at-1", 0, "agent", "gen_ai.user.message")
    assert (row["Body"], row["LogAttributes"], row["AttrTypes"]) == ('{"n":1,"said":"hi"}', {"k": "1"}, {"body:": "kvlist", "k": "int"})


async def test_bad_spans_are_refused_with_count_and_reason_and_the_rest_is_kept(stack: Stack, reader: TraceReader) -> None:
    ids = {conventions.ROLLOUT_ID: "ro-partial", conventions.ATTEMPT_ID: "at-1"}
    bad = span("work", {conventions.ROLLOUT_ID: "no good"})
    zero = span()
    zero.trace_id = bytes(16)
    answer = await post_spans(stack, request_of([span(), bad, zero, bad, span()], ids), ack="stored")
    assert answer.partial_success.rejected_spans == 3
    assert "2 × rollout id" in answer.partial_success.error_message
    assert "1 × trace id" in answer.partial_success.error_message
    assert [found.sequence_id for found in await reader.spans(["ro-partial"])] == [1, 2]


@pytest.mark.parametrize("way", ["grpc", "http", "json"])
@pytest.mark.parametrize("what", ["no UTF-8", "90 deep"])
async def test_only_the_unreadable_span_of_a_request_is_refused(what: str, way: str, stack: Stack, reader: TraceReader) -> None:
    rollout = f"ro-unreadable-{way}-{what.replace(' ', '-')}"
    ids = {conventions.ROLLOUT_ID: rollout, conventions.ATTEMPT_ID: "at-1"}
    request = request_of([span(), span("BADNAME"), span()], ids)
    if what == "90 deep":
        value = AnyValue(int_value=1)
        for _ in range(90):
            outer = AnyValue()
            outer.kvlist_value.values.add(key="k").value.CopyFrom(value)
            value = outer
        request.resource_spans[0].scope_spans[0].spans[1].attributes.add(key="deep").value.CopyFrom(value)
    raw = request.SerializeToString()
    if what == "no UTF-8":
        raw = raw.replace(b"BADNAME", b"BAD\xffAME")
    for _ in range(2):  # a resend gets the same response
        if way == "grpc":
            async with grpc.aio.insecure_channel(stack.grpc) as channel:
                answer = ExportTraceServiceResponse.FromString(await call(channel, METHOD)(raw, metadata=(("agl-ack", "stored"),)))
        else:
            body = raw if way == "http" else otlp_json(request).replace(b"BADNAME", b"BAD\\ud800" if what == "no UTF-8" else b"BADNAME")
            kind = "application/x-protobuf" if way == "http" else "application/json"
            headers = {"Content-Type": kind, "agl-ack": "stored"}
            async with aiohttp.ClientSession() as session, session.post(f"{stack.http}/v1/traces", data=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                data = await response.read()
            answer = ExportTraceServiceResponse.FromString(data) if way == "http" else json_format.Parse(data, ExportTraceServiceResponse())
        assert answer.partial_success.rejected_spans == 1
        assert answer.partial_success.error_message == f"1 × {UNREADABLE}"
    assert [found.sequence_id for found in await reader.spans([rollout])] == [1, 2]


def otlp_json(request: ExportTraceServiceRequest) -> bytes:
    tree = json_format.MessageToDict(request)
    for each in (s for r in tree["resourceSpans"] for g in r["scopeSpans"] for s in g["spans"]):
        each.update({name: base64.b64decode(each[name]).hex() for name in ("traceId", "spanId")})
    return json.dumps(tree).encode()


async def test_bytes_that_are_not_a_request_are_invalid(stack: Stack) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.http}/v1/traces", data=b"\xff\xff\xff", headers={"Content-Type": "application/x-protobuf"}) as response,
    ):
        assert (response.status, response.content_type) == (400, "application/x-protobuf")
        status = Status.FromString(await response.read())
        assert (status.code, "no OTLP traces request" in status.message) == (3, True)
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(channel, METHOD)(b"\xff\xff\xff")
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(channel, "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export")(b"")
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert METHOD in str(failure.value.details())


async def test_an_empty_request_is_a_success(stack: Stack) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.http}/v1/traces", headers={"Content-Type": "application/x-protobuf"}) as response,
    ):
        assert (response.status, await response.read()) == (200, b"")


async def test_a_wrong_content_type_gets_the_right_ones_named(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{stack.http}/v1/traces", data="hi") as response:
        assert response.status == 415
        assert "application/x-protobuf" in await response.text()


async def test_gzip_bodies_and_headers_with_ids_are_taken(stack: Stack, reader: TraceReader) -> None:
    body = gzip.compress(request_of([span(), span()]).SerializeToString())
    headers = {
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "gzip",
        "AGL-Rollout-Id": "ro-header",
        "agl-attempt-id": "at-h",
    }
    async with aiohttp.ClientSession() as session, session.post(f"{stack.http}/v1/traces", data=body, headers=headers) as response:
        assert response.status == 200
    await reader.barrier()
    assert [(found.attempt_id, found.sequence_id) for found in await reader.spans(["ro-header"])] == [("at-h", 1), ("at-h", 2)]


async def test_grpc_metadata_name_the_rollout_and_ack_stored_means_visible(stack: Stack, reader: TraceReader) -> None:
    metadata = ((conventions.HEADER_ROLLOUT_ID, "ro-meta"), (conventions.HEADER_ATTEMPT_ID, "at-m"), (conventions.HEADER_ACK, "stored"))
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        answer = await call(channel, METHOD)(request_of([span()]).SerializeToString(), metadata=metadata)
    assert ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans == 0
    assert len(await reader.spans(["ro-meta"])) == 1


async def test_a_resend_is_stored_once_and_gets_the_first_answer(stack: Stack, reader: TraceReader) -> None:
    bad = span("work", {conventions.ROLLOUT_ID: "no good"})
    request = request_of([span(), bad], {conventions.ROLLOUT_ID: "ro-resend", conventions.ATTEMPT_ID: "at-1"})
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(post_on(session, stack, request, ack=ack) for ack in ("durable", "durable", "stored")))
    assert {answer.partial_success.rejected_spans for answer in answers} == {1}
    (row,) = await reader.query("SELECT count() AS n FROM otel_traces WHERE RolloutId = 'ro-resend'")
    assert row["n"] == 1


async def test_the_same_bytes_with_other_ids_are_not_a_resend(stack: Stack, reader: TraceReader) -> None:
    request = request_of([span()])
    for rollout in ("ro-one", "ro-two"):
        await post_spans(stack, request, ack="stored", agl_rollout_id=rollout)
    assert {found.rollout_id for found in await reader.spans(["ro-one", "ro-two"])} == {"ro-one", "ro-two"}


async def test_spans_without_any_id_are_kept(stack: Stack, reader: TraceReader) -> None:
    unidentified = span("lonely")
    await post_spans(stack, request_of([unidentified]), ack="stored")
    (row,) = await reader.query(
        "SELECT RolloutId, SequenceId FROM otel_traces WHERE SpanId = {s:String}", params={"s": unidentified.span_id.hex()}
    )
    assert row == {"RolloutId": "", "SequenceId": 0}


async def test_explicit_numbers_win_and_raise_the_counter(stack: Stack, reader: TraceReader) -> None:
    ids = {conventions.ROLLOUT_ID: "ro-explicit", conventions.ATTEMPT_ID: "at-1"}
    await post_spans(stack, request_of([span("a"), span("b", {conventions.SEQUENCE_ID: 10})], ids), ack="stored")
    await post_spans(stack, request_of([span("c")], ids), ack="stored")
    numbers = {found.name: found.sequence_id for found in await reader.spans(["ro-explicit"])}
    assert numbers["b"] == 10
    assert numbers["c"] == 12 or numbers["a"] < 10 < numbers["c"]


async def test_numbers_of_a_rollout_are_shared_by_its_attempts_without_gaps(stack: Stack, reader: TraceReader) -> None:
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            *(post_on(session, stack, span_request([("ro-shared", f"at-{n % 3}")], spans=4), ack="stored") for n in range(12))
        )
    assert [found.sequence_id for found in await reader.spans(["ro-shared"])] == list(range(1, 49))


async def test_the_barrier_over_grpc_returns_when_everything_acked_is_visible(stack: Stack, reader: TraceReader) -> None:
    await post_spans(stack, span_request([("ro-barrier", "at-1")], spans=5))
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        assert await call(channel, "/agl.collector.v1.Collector/Barrier")(b"") == b""
    assert len(await reader.spans(["ro-barrier"])) == 5
