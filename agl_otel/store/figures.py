"""Metrics of a training run as OpenTelemetry gauges, sent through the collector like all observations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel.store.connections import Connected
from agl_otel_hook import conventions

PREFIX: Final = conventions.TRAINING_FIGURES
"""Prefix of the metrics' names."""
TRAINER: Final = {"service.name": "agl-otel-trainer"}
"""The OpenTelemetry resource of trainers' figures and steps."""


class Figures(Connected):
    """The part of the store for figures."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Store the latest figures of a training run (`logprob_drift`, `stale_share`, …) in otel_metrics_gauge, as `agl.training.NAME`.

        The web service's /metrics shows the latest of each for a day. Values that are not finite are left out.
        Raises UnavailableError if no collector accepts them, DataError if it accepts no metrics (AGL_METRICS).
        """
        request = figures_request(figures, algorithm, time.time_ns())
        await (await self._open()).writer.write_metrics(request)


def figures_request(figures: Mapping[str, float], algorithm: str, now_nano: int) -> ExportMetricsServiceRequest:
    """Serialise figures as an OTLP request."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(text_attributes(TRAINER))
    metrics = group.scope_metrics.add().metrics
    for name, value in figures.items():
        if math.isfinite(value):
            point = metrics.add(name=PREFIX + name).gauge.data_points.add(time_unix_nano=now_nano, as_double=float(value))
            point.attributes.extend(text_attributes({"algorithm": algorithm}))
    return request


def text_attributes(attributes: Mapping[str, str]) -> list[KeyValue]:
    """Return attributes in OTLP's form."""
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in attributes.items()]
