"""A real ClickHouse stores the same rows of both cores, and the collector answers the same with either."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, example, given, settings
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from agl_otel.collector.core import Kind, PythonCore, core
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Batch, Request
from agl_otel.collector.scan import AHEAD_NANO
from agl_otel.collector.store_batch import BatchStore
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.schema import create_schema
from agl_otel_hook import conventions
from agl_otel_hook.varint import varint
from tests.cores import needs_compiled_core, rows
from tests.fuzz.core import seeds
from tests.native_block import read_block
from tests.otlp_requests import NOW, log_requests, trace_requests
from tests.unit.adapters.test_hostile_spans import HOSTILE

from .otlp import Value, request_of, span
from .stack import Stack, new_stack, start

METHODS: dict[Kind, str] = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
STORED: dict[Kind, str] = {
    "traces": "SELECT * EXCEPT (BatchId, BatchPos, ReceivedAt, SequenceId) FROM otel_traces ORDER BY BatchId, BatchPos FORMAT JSONEachRow",
    "logs": "SELECT * EXCEPT (BatchId, BatchPos, ReceivedAt, SequenceId, TimestampTime) "
    "REPLACE (if(Timestamp = ReceivedAt, toDateTime64(0, 9), Timestamp) AS Timestamp) "
    "FROM otel_logs ORDER BY BatchId, BatchPos FORMAT JSONEachRow",
}
"""What is stored of each, but for what the clock says: the receipt, whose time records without one have, and numbers, taken by batches."""


@pytest.fixture(scope="module")
def stored_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path_factory.mktemp("rows") / "traces")
    create_schema(made, where="the test")
    yield made
    made.close()


batches = itertools.count(1)


def as_stored(engine: ChdbEngine, signal: Kind, batch: int) -> list[dict[str, Any]]:
    """Read the rows of a batch, all columns, in the form of tests.cores.rows."""
    types = engine.select(f"SELECT name, type FROM system.columns WHERE database = 'otel' AND table = 'otel_{signal}'")
    plain = {name: str(of).replace("LowCardinality(String)", "String") for name, of in types}
    columns = ", ".join(f"CAST(`{name}` AS {of}) AS `{name}`" for name, of in plain.items() if of != "DateTime")  # which is derived
    data = engine.read(f"SELECT {columns} FROM otel.otel_{signal} WHERE BatchId = {batch} ORDER BY BatchPos", "Native")
    return read_block(data) if data else []


def full_spans() -> ExportTraceServiceRequest:
    """A span in which no column has its type's zero, and each number needs all of its column's bytes."""
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add()
    spans.resource.attributes.add(key="service.name").value.string_value = "service"
    scope = spans.scope_spans.add()
    scope.scope.name, scope.scope.version = "scope", "1.2"
    made = scope.spans.add(trace_id=b"\xfe" * 16, span_id=b"\xfd" * 8, parent_span_id=b"\xfc" * 8, trace_state="a=b", name="work", kind=3)
    made.start_time_unix_nano, made.end_time_unix_nano = NOW - (1 << 55) - 1, NOW - 1
    made.status.code, made.status.message = Status.STATUS_CODE_ERROR, "why"
    for key, values in (
        ("prompt_token_ids", (0xFFFFFFFE, 1)),
        ("response_token_ids", (0xFFFFFFFD, 2)),
        ("response_logprobs", (-0.25, -1.5)),
    ):
        items = made.attributes.add(key=f"agentlightning.llm.{key}").value.array_value.values
        for value in values:
            setattr(items.add(), "double_value" if isinstance(value, float) else "int_value", value)
    made.attributes.add(key="agentlightning.llm.call").value.int_value = 1 << 40
    made.attributes.add(key="gen_ai.input.messages").value.string_value = '[{"type": "image"}]'
    event = made.events.add(name="event", time_unix_nano=NOW - 2)
    event.attributes.add(key="of the event").value.bool_value = True
    link = made.links.add(trace_id=b"\xfb" * 16, span_id=b"\xfa" * 8, trace_state="c=d")
    link.attributes.add(key="of the link").value.double_value = 0.5
    return request


def full_records() -> ExportLogsServiceRequest:
    """A log record of the same sort."""
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add(schema_url="https://resource")
    records.resource.attributes.add(key="service.name").value.string_value = "service"
    scope = records.scope_logs.add(schema_url="https://scope")
    scope.scope.name, scope.scope.version = "scope", "1.2"
    scope.scope.attributes.add(key="of the scope").value.string_value = "a"
    made = scope.log_records.add(trace_id=b"\xfe" * 16, span_id=b"\xfd" * 8, time_unix_nano=NOW - 1, flags=0xFE, severity_number=24)
    made.severity_text, made.event_name = "FATAL", "event"
    made.body.string_value = "body"
    made.attributes.add(key="of the record").value.int_value = 1
    return request


def test_a_full_request_fills_every_column() -> None:
    """So that no column is compared by its default alone (below)."""
    requests: list[tuple[Kind, Any]] = [("traces", full_spans()), ("logs", full_records())]
    for kind, request in requests:
        [row], _ = rows(PythonCore(), kind, request.SerializeToString(), [Identity("ro-1", "at-1", 1, "")])
        assert not [name for name, value in row if not value]


@needs_compiled_core
@example(full_spans(), full_records())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # each: four inserts
@given(trace_requests(), log_requests())
def test_clickhouse_stores_what_the_specification_says(stored_rows: ChdbEngine, traces: Any, logs: Any) -> None:
    kinds: list[tuple[Kind, Any]] = [("traces", traces), ("logs", logs)]
    for signal, request in kinds:
        raw = request.SerializeToString()
        scan, _ = core().scan(signal, raw, latest=NOW + AHEAD_NANO, max_attributes=100)
        defects = dict(scan.defects)
        identities = [Identity("ro-1", "at-1", index, defects.get(index, "")) for index in range(sum(scan.groups))]
        for used in (PythonCore(), core()):
            batch = next(batches)
            BatchStore(stored_rows, Path("unused"), used).store(
                Batch(batch, 0, 0), [(0, Request(signal, NOW // 10**6, Identities.of(identities), raw))], in_doubt=False
            )
            expected, _ = rows(PythonCore(), signal, raw, identities)
            stored = as_stored(stored_rows, signal, batch)
            given = {"BatchId", "BatchPos", "SequenceId", "ConversationId", "Rewards"}  # of the last two, no insert has a column
            assert [{n: v for n, v in row.items() if n not in given} for row in stored] == [
                {n: v for n, v in row if n not in given} for row in expected
            ]


def crowded() -> list[tuple[Kind, bytes]]:
    """Requests of very many next to empty parts."""
    spans = b"\x12\x00" * 10_000
    part = b"\x12" + varint(len(spans)) + spans
    attributes = b"\x12" + varint(20_000) + b"\x4a\x00" * 10_000
    other = b"\x12" + varint(len(attributes)) + attributes
    return [
        ("traces", b"\x0a\x00" * 70_000),
        ("logs", b"\x0a\x00" * 70_000),
        *(("traces", b"\x0a" + varint(len(each)) + each) for each in (part, other)),
        ("logs", b"\x0a" + varint(len(part)) + part),
        ("traces", b"\x78\x01" * 300_000),
    ]


async def answers(stack: Stack, cases: list[tuple[Kind, bytes]]) -> list[object]:
    """Send all over HTTP, then over gRPC (with another rollout id: else they were resends); return each answer, then what is stored."""
    found: list[object] = []
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(stack.grpc) as channel:
        headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ROLLOUT_ID: "ro-http"}
        for kind, raw in cases:
            async with session.post(f"{stack.http}/v1/{kind}", data=raw, headers=headers) as response:
                found.append((response.status, await response.read()))
        for kind, raw in cases:
            call: Any = channel.unary_unary(METHODS[kind], request_serializer=bytes, response_deserializer=bytes)
            try:
                found.append(await call(raw, metadata=((conventions.HEADER_ROLLOUT_ID, "ro-grpc"),)))
            except grpc.aio.AioRpcError as error:
                found.append((error.code(), error.details()))
        async with session.post(f"{stack.http}/barrier") as response:
            assert response.status == 200
        for query in STORED.values():
            async with session.post(stack.sql, data=query) as response:
                text = await response.text()
                assert response.status == 200, text
                found += text.splitlines()
    return found


@pytest.mark.full
@needs_compiled_core
async def test_the_collector_answers_and_stores_the_same_with_either_core(tmp_path: Path) -> None:
    """Of all golden vectors and hostile requests."""
    found_seeds: dict[Kind, list[bytes]] = seeds()
    cases: list[tuple[Kind, bytes]] = [*((kind, raw) for kind, requests in found_seeds.items() for raw in requests), *crowded()]
    texts: dict[str, Value] = {f"k{number}": text for number, text in enumerate(HOSTILE) if isinstance(text, str)}
    cases.append(("traces", request_of([span("hostile", texts, trace=b"t" * 16)]).SerializeToString()))
    found: list[list[object]] = []
    for name in ("compiled", "python"):
        (tmp_path / name).mkdir()
        with closing(new_stack(tmp_path / name)) as stack:
            stack.environment["AGL_CORE"] = name
            await start(stack)
            found.append(await answers(stack, cases))
    compiled, python = found
    assert len(compiled) > 3 * len(cases)  # the answers and the rows
    differing = [(number, one, other) for number, (one, other) in enumerate(itertools.zip_longest(compiled, python)) if one != other]
    assert not differing[:3]
    assert {type(each) for each in compiled} == {tuple, bytes, str}
