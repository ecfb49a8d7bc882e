"""Pushes a service's own metrics, those of its /metrics, to an OTLP endpoint over gRPC (`AGL_METRICS_OTLP`).

OpenTelemetry's exporter sends them. The collector's come from a Meter; the numbers of other services (meters.py) are converted here. An
unreachable endpoint costs only a line in the log: counters are cumulative, so the next push makes up for a missed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Final, cast

from grpc import Compression
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from agl_otel import __version__
from agl_otel.errors import AglError, SettingsError
from agl_otel.net.tls import ambient, target
from agl_otel.settings import Settings, parse_headers
from agl_otel.telemetry.meters import Durations, Family

CALL_SECONDS: Final = 10.0
LAST_PUSH_SECONDS: Final = 2.0  # bound of the last push, when a service stops
CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
ReadMetrics = Callable[[], Awaitable[MetricsData]]
_EXPORTER_LOG: Final = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def pushing(read: ReadMetrics, settings: Settings) -> AsyncGenerator[None]:
    """Push what `read` returns every `metrics_otlp_seconds` while the block runs, and once more at its end. Raises SettingsError."""
    push = _Push(read, settings)
    over = asyncio.Event()

    async def keep_pushing() -> None:
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.metrics_otlp_seconds):
                    await over.wait()
            last = over.is_set()
            await push()

    task = asyncio.create_task(keep_pushing(), name="metrics")
    try:
        yield
    finally:
        over.set()
        await asyncio.wait({task}, timeout=LAST_PUSH_SECONDS)
        push.end()
        await asyncio.wait({task})
        push.close()


class _Push:
    """Sends all metrics on each call, and logs trouble with the endpoint once. Raises SettingsError."""

    def __init__(self, read: ReadMetrics, settings: Settings) -> None:
        self._read = read
        self._given = settings.metrics_otlp
        endpoint = target(self._given)
        if not endpoint.rpartition(":")[2].isdigit():
            raise SettingsError(f"AGL_METRICS_OTLP {self._given!r} is no endpoint of OTLP over gRPC: write HOST:4317 or https://HOST:4317")
        headers = parse_headers(settings.metrics_otlp_headers.get_secret_value(), "AGL_METRICS_OTLP_HEADERS")
        trust = ambient()
        secure = trust.uses_tls(self._given)
        self._exporter = OTLPMetricExporter(
            endpoint,
            insecure=not secure,
            credentials=trust.credentials() if secure else None,
            headers=tuple(headers.items()) or ",",  # if empty, it would send OTEL_EXPORTER_OTLP_HEADERS, meant for the user's vendor
            timeout=CALL_SECONDS,
            compression=Compression.NoCompression,
        )
        self._problem = ""
        self._reasons = _Reasons(endpoint)
        _EXPORTER_LOG.addFilter(self._reasons)

    async def __call__(self) -> None:
        before, self._problem = self._problem, ""
        try:
            if await asyncio.to_thread(self._exporter.export, await self._read()) is not MetricExportResult.SUCCESS:
                self._problem = self._reasons.last or "no reason was given"
        except AglError as error:  # reading another service's metric failed
            self._problem = str(error)
        if self._problem and not before:
            _log.warning("metrics are not pushed to %s (AGL_METRICS_OTLP); trying again: %s", self._given, self._problem)
        elif before and not self._problem:
            _log.warning("metrics are pushed to %s again", self._given)

    def end(self) -> None:
        """Close the connection; cancel a call in flight."""
        self._exporter.shutdown()

    def close(self) -> None:
        """Remove the filter of the exporter's log; no call may be in flight."""
        _EXPORTER_LOG.removeFilter(self._reasons)


class _Reasons(logging.Filter):
    """Filters out the exporter's messages about each failed try to `endpoint`: _Push logs the trouble once."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if not isinstance(record.args, tuple) or not {"metrics", self._endpoint} <= {*map(str, record.args)}:
            return True
        self.last = record.getMessage()
        return False


class Pushed:
    """Converts a service's families to OpenTelemetry's metrics. `service` is its name without `agl-otel-`."""

    def __init__(self, service: str, families: Callable[[], Awaitable[Iterable[Family]]], clock: Callable[[], int] = time.time_ns) -> None:
        self._families = families
        self._clock = clock
        self._began = clock()
        instance = f"{socket.gethostname()}:{os.getpid()}"
        names = {"service.name": f"agl-otel-{service}", "service.version": __version__, "service.instance.id": instance}
        self._resource = Resource(names)
        self._scope = InstrumentationScope(f"agl_otel.{service}", __version__)

    async def data(self) -> MetricsData:
        """Return the current state of all metrics."""
        families, now = await self._families(), self._clock()
        scope_metrics = ScopeMetrics(self._scope, [self._metric(family, now) for family in families], schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope_metrics], schema_url="")])

    def _metric(self, family: Family, now: int) -> Metric:
        if family.kind == "histogram":
            return Metric(family.name, family.about, "s", Histogram([self._buckets(*each, now) for each in family.durations], CUMULATIVE))
        points = [NumberDataPoint(dict(labels), self._began, now, float(value)) for labels, value in family.samples]
        data = Sum(points, CUMULATIVE, is_monotonic=True) if family.kind == "counter" else Gauge(points)
        return Metric(family.name, family.about, "", data)

    def _buckets(self, labels: Mapping[str, str], found: Durations, now: int) -> HistogramDataPoint:
        counts, unknown = list(found.buckets), cast("float", None)  # None leaves min and max out
        return HistogramDataPoint(
            dict(labels), self._began, now, sum(counts), found.seconds, counts, found.bounds, min=unknown, max=unknown
        )
