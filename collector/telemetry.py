"""The collector's own telemetry: OpenTelemetry metrics of one Meter, read as JSON (/status) and in Prometheus' text format (/metrics).

Counters are read on demand from plain numbers that the parts keep anyway, so they cost a request nothing; only durations are recorded as
they happen. The collector has its own meter provider and changes no other metrics of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, MetricsData
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from agl_otel import __version__

Readings = Iterable[tuple[float, Mapping[str, str]]]
"""(value, attributes) pairs."""
SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram buckets, in seconds."""
QUANTILES: Final = (0.5, 0.99)


class Telemetry:
    """Instruments and their readers.

    `count` and `gauge` register functions that return the values; the writer records the three durations.
    """

    def __init__(self) -> None:
        self._memory = InMemoryMetricReader()
        self._registry = CollectorRegistry()
        readers = [self._memory, PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)]
        resource = Resource({"service.name": "agl-otel-collector", "service.version": __version__})
        self._provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("agl_otel.collector", __version__)

        def seconds(name: str, description: str) -> Callable[[float], None]:
            made = self._meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=SECONDS)
            return made.record

        self.waited = seconds(
            "agl.collector.wait.duration", "from receipt of a batch's first request until its insert begins: log, queue, numbers"
        )
        self.inserted = seconds("agl.collector.insert.duration", "one insert into ClickHouse, all its tables")
        self.visible = seconds("agl.collector.visible.duration", "from receipt of a batch's first request until visible to queries")

    def count(self, name: str, unit: str, description: str, read: Callable[[], Readings]) -> None:
        """Create a counter; its values only increase."""
        self._meter.create_observable_counter(f"agl.collector.{name}", [_observe(read)], unit, description)

    def gauge(self, name: str, unit: str, description: str, read: Callable[[], Readings]) -> None:
        """Create a gauge of the current value."""
        self._meter.create_observable_gauge(f"agl.collector.{name}", [_observe(read)], unit, description)

    def batch_stored(self, received_ms: int, began_at: float, seconds: float) -> None:
        """Record a batch that became visible: receipt of its first request (Unix ms), start (Unix s) and duration of its insert."""
        self.inserted(seconds)
        waited = max(0.0, began_at - received_ms / 1000)
        self.waited(waited)
        self.visible(waited + seconds)

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Return {name: points}: each {"attributes", "value"}, or for durations {"attributes", "count", "sum", "p50", "p99"}."""
        data = self._memory.get_metrics_data()
        found: dict[str, list[dict[str, Any]]] = {}
        for resource_metrics in data.resource_metrics if data else ():
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    found[metric.name] = [_point(point) for point in metric.data.data_points]
        return found

    def data(self) -> MetricsData:
        """Return all metrics, for an exporter."""
        return self._memory.get_metrics_data() or MetricsData([])

    def prometheus(self) -> tuple[bytes, str]:
        """Return (body, content type) for GET /metrics."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def close(self) -> None:
        """Close the readers."""
        self._provider.shutdown()


def _observe(read: Callable[[], Readings]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [Observation(value, dict(attributes)) for value, attributes in read()]


def _point(point: Any) -> dict[str, Any]:
    attributes = dict(point.attributes or {})
    if not isinstance(point, HistogramDataPoint):
        return {"attributes": attributes, "value": point.value}
    quantiles = {f"p{int(share * 100)}": quantile(point.bucket_counts, point.explicit_bounds, share) for share in QUANTILES}
    return {"attributes": attributes, "count": point.count, "sum": round(point.sum, 6), **quantiles}


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the upper bound of the quantile's bucket (the last bound if it lies above all bounds); None if nothing was counted."""
    total = sum(counts)
    if not total:
        return None
    return next(bound for bound, reached in zip((*bounds, bounds[-1]), accumulate(counts), strict=True) if reached >= share * total)


class Stopwatch:
    """Start time (Unix seconds) and the duration since then."""

    def __init__(self) -> None:
        self.began_at = time.time()
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start
