"""OTLP metrics from the SDK's exporters to the standard tables, through the same log and with the same acks."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc.aio
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource

from agl_otel.traces.reader import TraceReader
from agl_otel_hook import conventions

from .otlp import attributes
from .stack import Stack

METHOD = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
EXPORTERS: dict[str, Callable[[Stack], MetricExporter]] = {
    "grpc": lambda stack: GrpcMetrics(endpoint=stack.grpc, insecure=True),
    "http": lambda stack: HttpMetrics(endpoint=f"{stack.http}/v1/metrics"),
}


@pytest.mark.parametrize("kind", EXPORTERS)
async def test_every_kind_of_the_sdk_lands_in_its_table(kind: str, stack: Stack, reader: TraceReader) -> None:
    service = f"service-{kind}"

    def emit() -> None:
        resource = Resource({"service.name": service, conventions.ROLLOUT_ID: f"ro-{kind}", conventions.ATTEMPT_ID: "at-1"})
        views = [View(instrument_type=Histogram, instrument_name="exp", aggregation=ExponentialBucketHistogramAggregation())]
        exporting = PeriodicExportingMetricReader(EXPORTERS[kind](stack), export_interval_millis=60_000)
        provider = MeterProvider([exporting], resource=resource, shutdown_on_exit=False, views=views)
        meter = provider.get_meter("scope", "1.2")
        meter.create_counter("sum", "{thing}", "things").add(3, {"k": "v", "n": 1})
        meter.create_gauge("gauge").set(2.5)
        meter.create_histogram("hist", explicit_bucket_boundaries_advisory=[1.0, 2.0]).record(1.5)
        exp = meter.create_histogram("exp")
        for value in (-1.0, 0.0, 4.0):
            exp.record(abs(value))
        provider.shutdown()

    await asyncio.to_thread(emit)
    await reader.barrier()

    async def row(table: str) -> dict[str, Any]:
        (found,) = await reader.query(f"SELECT * FROM otel_metrics_{table} WHERE ServiceName = {{s:String}}", params={"s": service})
        assert (found["RolloutId"], found["AttemptId"], found["ScopeName"], found["ScopeVersion"]) == (f"ro-{kind}", "at-1", "scope", "1.2")
        return found

    found = await row("sum")
    assert (found["MetricName"], found["MetricUnit"], found["MetricDescription"]) == ("sum", "{thing}", "things")
    assert (found["Value"], found["IsMonotonic"], found["AggregationTemporality"]) == (3, True, 2)
    assert found["Attributes"] == {"k": "v", "n": "1"}
    assert (await row("gauge"))["Value"] == 2.5
    found = await row("histogram")
    assert (found["Count"], found["Sum"], found["BucketCounts"], found["ExplicitBounds"]) == (1, 1.5, [0, 1, 0], [1.0, 2.0])
    found = await row("exponential_histogram")
    assert (found["Count"], found["ZeroCount"], found["Max"], sum(found["PositiveBucketCounts"])) == (3, 1, 4.0, 2)


def by_hand(service: str) -> ExportMetricsServiceRequest:
    """Build a summary, exemplars, numbers that are not finite, an invalid time, and a metric without data."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(attributes({"service.name": service, conventions.ROLLOUT_ID: "no good"}))
    metrics = group.scope_metrics.add().metrics
    now = time.time_ns()
    summary = metrics.add(name="summary").summary.data_points.add(time_unix_nano=now, count=4, sum=10.0)
    summary.quantile_values.add(quantile=0.5, value=2.0)
    gauge = metrics.add(name="gauge").gauge.data_points
    for value in (float("inf"), float("-inf"), float("nan")):
        gauge.add(time_unix_nano=now, as_double=value)
    gauge.add(time_unix_nano=now, as_int=-7).exemplars.add(time_unix_nano=now, as_int=9, trace_id=b"t" * 16, span_id=b"s" * 8)
    gauge.add(time_unix_nano=17, as_int=1)
    metrics.add(name="nothing")
    return request


async def test_points_that_cannot_be_stored_are_counted_and_the_rest_is_kept(stack: Stack, reader: TraceReader) -> None:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        answer = ExportMetricsServiceResponse.FromString(await call(by_hand("odd").SerializeToString()))
    assert answer.partial_success.rejected_data_points == 2
    assert "1 × timestamp" in answer.partial_success.error_message
    assert "1 × metric has no data" in answer.partial_success.error_message
    await reader.barrier()
    (row,) = await reader.query("SELECT * FROM otel_metrics_summary WHERE ServiceName = 'odd'")
    assert (row["Count"], row["ValueAtQuantiles.Quantile"], row["ValueAtQuantiles.Value"], row["RolloutId"]) == (4, [0.5], [2.0], "")
    columns = "toString(Value) AS v, Exemplars.Value AS e, Exemplars.TraceId AS t"
    rows = await reader.query(f"SELECT {columns} FROM otel_metrics_gauge WHERE ServiceName = 'odd' ORDER BY BatchPos")
    assert [row["v"] for row in rows] == ["inf", "-inf", "nan", "-7"]
    assert (rows[3]["e"], rows[3]["t"]) == ([9.0], [(b"t" * 16).hex()])


@pytest.mark.full
async def test_acked_points_survive_kill_9_once(own_stack: Stack) -> None:
    await own_stack.start_queue()
    killed = (
        "import os, signal, sys\n"
        "from agl_otel.collector import faults\n"
        "from agl_otel.collector.__main__ import main\n"
        "faults.hooks['inserted'] = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(main())"
    )
    await own_stack.start_collector("-c", killed)
    headers = {"Content-Type": "application/x-protobuf"}
    url = f"{own_stack.http}/v1/metrics"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=by_hand("crash").SerializeToString(), headers=headers) as response,
    ):
        assert response.status == 200
    assert await asyncio.to_thread(own_stack.processes["collector"].wait, 30) == -signal.SIGKILL
    await own_stack.start_collector()
    async with own_stack.reader() as reader:
        await reader.barrier()
        for table, expected in (("gauge", 4), ("summary", 1)):
            assert await reader.query(f"SELECT count() AS n FROM otel_metrics_{table}") == [{"n": expected}]


async def test_metrics_can_be_disabled_and_the_refusal_says_how(own_stack: Stack) -> None:
    own_stack.settings.metrics = False
    await own_stack.start_collector()
    headers = {"Content-Type": "application/x-protobuf"}
    async with aiohttp.ClientSession() as session, session.post(f"{own_stack.http}/v1/metrics", headers=headers) as response:
        assert response.status == 501
        assert b"AGL_METRICS" in await response.read()
    async with grpc.aio.insecure_channel(own_stack.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="AGL_METRICS") as failure:
            await channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)(b"")
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
