"""A bad disk under a real collector: acked spans are compared with the store after a bit of the log was flipped."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable

import aiohttp
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.journal import BATCH, REQUEST, STORED
from agl_otel.service.framed import HEADER_BYTES, Frame, read

from .otlp import any_value, post_on, span_request
from .stack import Stack
from .test_crash import KILLED_AT

pytestmark = pytest.mark.full
REQUESTS = 30
SPANS = 2


def ids(requests: Iterable[ExportTraceServiceRequest]) -> list[str]:
    return [s.span_id.hex() for request in requests for r in request.resource_spans for g in r.scope_spans for s in g.spans]


async def acknowledged(stack: Stack, *, ack: str) -> list[ExportTraceServiceRequest]:
    """Send requests one after another, each a group of its own, and return them when they are acked."""
    sent = [span_request([(f"ro-{number}-x", "at-0")], spans=SPANS) for number in range(REQUESTS)]
    async with aiohttp.ClientSession() as session:
        for request in sent:
            await post_on(session, stack, request, ack=ack)
    return sent


def flip(stack: Stack, kind: int, which: int, *, header: bool = False) -> None:
    """Flip a bit in a record of this kind, in the log's only segment: in the middle of its payload, or in its header."""
    (segment,) = stack.settings.wal_dir.glob("*.wal")
    record = [each for each in read(segment, first=int(segment.stem)) if isinstance(each, Frame) and each.kind == kind][which]
    data = bytearray(segment.read_bytes())
    data[record.offset + (20 if header else HEADER_BYTES + len(record.payload) // 2)] ^= 4
    segment.write_bytes(data)


async def check(
    stack: Stack,
    acked: list[ExportTraceServiceRequest],
    *,
    lost: Iterable[ExportTraceServiceRequest] = (),
    cut_off: Iterable[ExportTraceServiceRequest] = (),
) -> None:
    """Check that every acked span, except the lost ones, is stored exactly once with a unique number; spans of `cut_off` at most once."""
    async with stack.reader() as reader:
        await reader.barrier()
        rows = await reader.query("SELECT SpanId, RolloutId, SequenceId FROM otel_traces")
    missing, maybe = set(ids(lost)), set(ids(cut_off))
    stored = Counter(row["SpanId"] for row in rows)
    assert max(stored.values()) == 1, "spans are stored twice"
    assert stored.keys() - maybe == {each for each in ids(acked) if each not in missing} - maybe
    assert max(Counter((row["RolloutId"], row["SequenceId"]) for row in rows).values()) == 1


@pytest.mark.parametrize(("number", "header"), [(0, True), (17, False), (17, True), (29, False)])
async def test_a_flipped_bit_in_the_open_segment_loses_one_request(number: int, header: bool, own_stack: Stack) -> None:
    await own_stack.start_collector()  # no queue: nothing can be numbered, so everything is only in the log
    acked = await acknowledged(own_stack, ack="durable")
    await own_stack.end("collector", signal.SIGKILL)
    flip(own_stack, REQUEST, number, header=header)
    await own_stack.start_queue()
    await own_stack.start_collector()
    await check(own_stack, acked, lost=[acked[number]])
    log = own_stack.log.read_text()
    assert "never acknowledged" not in log
    what = "torn or damaged; it is unknown whether it was acknowledged" if number == 29 else "ERROR agl_otel.service.framed .*damaged, lost"
    assert re.search(rf"{what}: record {number} \({SPANS} spans of 'ro-{number}-x'\);", log)
    (damaged,) = own_stack.settings.wal_dir.glob("*.damaged")
    assert f"ro-{number}-x".encode() in damaged.read_bytes()
    async with aiohttp.ClientSession() as session, session.get(f"{own_stack.http}/health") as response:
        health = await response.json()
    assert (health["log_torn_bytes"] > 0, health["log_damaged_bytes"] > 0) == (number == 29, number < 29)


@pytest.mark.parametrize(
    ("kind", "which", "header"),
    [(BATCH, 0, False), (BATCH, 12, True), (BATCH, -1, False), (STORED, 5, True), (STORED, -1, False), (REQUEST, 3, True)],
)
async def test_stored_rows_are_not_stored_again_whatever_record_is_lost(kind: int, which: int, header: bool, own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    acked = await acknowledged(own_stack, ack="stored")
    await own_stack.end("collector", signal.SIGKILL)
    flip(own_stack, kind, which, header=header)
    for _ in range(2):
        await own_stack.start_collector()
        await check(own_stack, acked)
        await own_stack.end("collector", signal.SIGKILL)


async def test_requests_of_a_lost_batch_are_stored_once(own_stack: Stack) -> None:
    """The record of the batch is lost, and none of its rows were inserted."""
    await own_stack.start_queue()
    await own_stack.start_collector("-c", KILLED_AT.format(point="batch-noted", nth=1))
    acked: list[ExportTraceServiceRequest] = []
    request = ExportTraceServiceRequest()
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            for number in range(10_000):
                request = span_request([(f"ro-{number}", "at-0")], spans=SPANS)
                await post_on(session, own_stack, request)
                acked.append(request)
    assert await asyncio.to_thread(own_stack.processes["collector"].wait, 30) == -signal.SIGKILL
    flip(own_stack, BATCH, -1)
    for point in ("batch-noted", "inserted"):
        process = own_stack.spawn("collector", "-c", KILLED_AT.format(point=point, nth=1))
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    await own_stack.start_collector()
    await check(own_stack, acked, cut_off=[request])


async def test_log_records_and_data_points_of_a_lost_batch_are_not_stored_again(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    now = time.time_ns()
    logs, metrics = ExportLogsServiceRequest(), ExportMetricsServiceRequest()
    records = logs.resource_logs.add().scope_logs.add().log_records
    for number in range(3):
        records.add(time_unix_nano=now + number, body=any_value(f"line {number}"))
    own = metrics.resource_metrics.add().scope_metrics.add().metrics
    own.add(name="gauge").gauge.data_points.add(time_unix_nano=now, as_double=1.5)
    points = own.add(name="sum").sum.data_points
    for number in range(2):
        points.add(time_unix_nano=now + number, as_int=number)
    headers = {"Content-Type": "application/x-protobuf", "agl-ack": "stored"}
    async with aiohttp.ClientSession() as session:
        for path, request in (("logs", logs), ("metrics", metrics)):
            async with session.post(f"{own_stack.http}/v1/{path}", data=request.SerializeToString(), headers=headers) as response:
                assert response.status == 200, await response.text()
    await own_stack.end("collector", signal.SIGKILL)
    flip(own_stack, BATCH, 0)
    flip(own_stack, BATCH, 0)
    await own_stack.start_collector()
    async with own_stack.reader() as reader:
        await reader.barrier()
        counts = {
            table: (await reader.query(f"SELECT count() AS n FROM {table}"))[0]["n"]
            for table in ("otel_logs", "otel_metrics_gauge", "otel_metrics_sum")
        }
    assert counts == {"otel_logs": 3, "otel_metrics_gauge": 1, "otel_metrics_sum": 2}
    assert "of their 6 rows 6 are stored" in own_stack.log.read_text()
