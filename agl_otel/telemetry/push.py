"""A service's own metrics to an OpenTelemetry endpoint, by OTLP over gRPC (`AGL_METRICS_OTLP`): what its /metrics tells, pushed.

The collector's are an OpenTelemetry Meter's; the other services keep plain numbers (meters.py), of which the messages are made here.
An endpoint that is away costs a line in the log and nothing else: counters only grow, so the next push tells all that one missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc.aio
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from agl_otel import __version__
from agl_otel.errors import AglError, SettingsError
from agl_otel.net.tls import aio_channel, target
from agl_otel.settings import Settings, parse_headers
from agl_otel.telemetry.exposition import Family

CALL_SECONDS: Final = 10.0
FAREWELL_SECONDS: Final = 2.0  # for the last push, when a service stops
CUMULATIVE: Final = pb.AGGREGATION_TEMPORALITY_CUMULATIVE
Tell = Callable[[], Awaitable[ExportMetricsServiceRequest]]
_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def pushing(tell: Tell, settings: Settings) -> AsyncGenerator[None]:
    """While the block runs: push what `tell` says every `metrics_otlp_seconds`, and once more at its end. Raises SettingsError."""
    if not target(settings.metrics_otlp).rpartition(":")[2].isdigit():
        raise SettingsError(
            f"AGL_METRICS_OTLP {settings.metrics_otlp!r} is no endpoint of OTLP over gRPC: write HOST:4317 or https://HOST:4317"
        )
    headers = tuple(parse_headers(settings.metrics_otlp_headers.get_secret_value(), "AGL_METRICS_OTLP_HEADERS").items())
    async with aio_channel(settings.metrics_otlp) as channel:
        export: Any = MetricsServiceStub(channel).Export
        trouble = ""

        async def push(seconds: float) -> None:
            nonlocal trouble
            before, trouble = trouble, ""
            try:
                answer = await export(await tell(), metadata=headers, timeout=seconds)
                if answer.partial_success.rejected_data_points:
                    trouble = f"{answer.partial_success.rejected_data_points} were refused: {answer.partial_success.error_message}"
            except grpc.aio.AioRpcError as error:
                trouble = f"{error.code().name}: {error.details()}"
            except AglError as error:  # of a figure that somebody else has to tell
                trouble = str(error)
            if trouble and not before:
                _log.warning("metrics are not pushed to %s (AGL_METRICS_OTLP); trying again: %s", settings.metrics_otlp, trouble)
            elif before and not trouble:
                _log.warning("metrics are pushed to %s again", settings.metrics_otlp)

        async def keep_pushing() -> None:
            while True:
                await asyncio.sleep(settings.metrics_otlp_seconds)
                await push(CALL_SECONDS)

        task = asyncio.create_task(keep_pushing(), name="metrics")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            await push(FAREWELL_SECONDS)


class Pushed:
    """OTLP messages of a service's families. `service` is its name without `agl-otel-`."""

    def __init__(self, service: str, families: Callable[[], Awaitable[Iterable[Family]]], clock: Callable[[], int] = time.time_ns) -> None:
        self._families = families
        self._clock = clock
        self._began = clock()
        instance = f"{socket.gethostname()}:{os.getpid()}"
        names = {"service.name": f"agl-otel-{service}", "service.version": __version__, "service.instance.id": instance}
        self._resource = Resource(attributes=_attributes(names))
        self._scope = InstrumentationScope(name=f"agl_otel.{service}", version=__version__)

    async def request(self) -> ExportMetricsServiceRequest:
        """All of it, as of now."""
        families, now = await self._families(), self._clock()
        scope_metrics = pb.ScopeMetrics(scope=self._scope, metrics=[self._metric(family, now) for family in families])
        return ExportMetricsServiceRequest(resource_metrics=[pb.ResourceMetrics(resource=self._resource, scope_metrics=[scope_metrics])])

    def _metric(self, family: Family, now: int) -> pb.Metric:
        made = pb.Metric(name=family.name, description=family.about)
        times: dict[str, Any] = {"start_time_unix_nano": self._began, "time_unix_nano": now}
        if family.kind == "histogram":
            made.unit = "s"
            made.histogram.aggregation_temporality = CUMULATIVE
            made.histogram.data_points.extend(
                pb.HistogramDataPoint(
                    attributes=_attributes(labels), count=sum(found.buckets), sum=found.seconds,
                    bucket_counts=found.buckets, explicit_bounds=found.bounds, **times,
                )
                for labels, found in family.durations
            )  # fmt: skip
            return made
        points = [pb.NumberDataPoint(attributes=_attributes(labels), as_double=value, **times) for labels, value in family.samples]
        if family.kind == "counter":
            made.sum.aggregation_temporality, made.sum.is_monotonic = CUMULATIVE, True
            made.sum.data_points.extend(points)
        else:
            made.gauge.data_points.extend(points)
        return made


def _attributes(labels: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in labels.items()]
