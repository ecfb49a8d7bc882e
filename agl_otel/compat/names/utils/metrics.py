"""0.3's `utils.metrics`, which counted metrics in the program; here every service has a metrics page (GET /metrics)."""

from __future__ import annotations

from typing import Any, NoReturn

from agl_otel.errors import UsageError

__all__ = ["ConsoleMetricsBackend", "MetricsBackend", "MultiMetricsBackend", "PrometheusMetricsBackend"]


class MetricsBackend:
    """0.3's base of metrics backends, which a Store does not take. Raises UsageError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse(type(self).__name__)


class ConsoleMetricsBackend(MetricsBackend):
    """0.3's backend. Raises UsageError."""


class PrometheusMetricsBackend(MetricsBackend):
    """0.3's backend. Raises UsageError."""


class MultiMetricsBackend(MetricsBackend):
    """0.3's backend. Raises UsageError."""


def _refuse(name: str) -> NoReturn:
    raise UsageError(f"{name} does not exist here: let Prometheus read /metrics of the web service, or use OpenTelemetry's metrics API")
