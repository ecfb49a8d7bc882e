"""0.3's `utils.metrics`: its metrics were counted in the program; here every service has its own page (GET /metrics)."""

from __future__ import annotations

from typing import Any, NoReturn

from agl_otel.errors import UsageError

__all__ = ["ConsoleMetricsBackend", "MetricsBackend", "MultiMetricsBackend", "PrometheusMetricsBackend"]


class MetricsBackend:
    """0.3's base: a store of ours takes none. Raises UsageError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse(type(self).__name__)


class ConsoleMetricsBackend(MetricsBackend):
    """As its base."""


class PrometheusMetricsBackend(MetricsBackend):
    """As its base."""


class MultiMetricsBackend(MetricsBackend):
    """As its base."""


def _refuse(name: str) -> NoReturn:
    raise UsageError(f"{name} does not exist here: let Prometheus read /metrics of the web service, or use OpenTelemetry's metrics API")
