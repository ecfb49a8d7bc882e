"""Figures of a training run, as OpenTelemetry gauges: what a trainer found goes the way of all that is observed."""

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
"""Of the metrics' names."""
TRAINER: Final = {"service.name": "agl-otel-trainer"}
"""The resource of figures and steps of trainers."""


class Figures(Connected):
    """The store's part for figures."""

    async def record_figures(self, figures: Mapping[str, float], *, algorithm: str) -> None:
        """Keep the latest figures of a training run (`logprob_drift`, `stale_share`, …) in otel_metrics_gauge, as `agl.training.NAME`.

        The web service's /metrics shows the latest of each for a day. What is not finite is left out.
        Raises UnavailableError where no collector takes them, DataError where it takes no metrics (AGL_METRICS).
        """
        request = figures_request(figures, algorithm, time.time_ns())
        await (await self._open()).writer.write_metrics(request)


def figures_request(figures: Mapping[str, float], algorithm: str, now_nano: int) -> ExportMetricsServiceRequest:
    """The OTLP request that carries them."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(_texts(TRAINER))
    metrics = group.scope_metrics.add().metrics
    for name, value in figures.items():
        if math.isfinite(value):
            point = metrics.add(name=PREFIX + name).gauge.data_points.add(time_unix_nano=now_nano, as_double=float(value))
            point.attributes.extend(_texts({"algorithm": algorithm}))
    return request


def _texts(attributes: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in attributes.items()]
