"""0.3's `utils.metrics`, which counted metrics in the program; here every service has a metrics page (GET /metrics)."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["ConsoleMetricsBackend", "MetricsBackend", "MultiMetricsBackend", "PrometheusMetricsBackend"]
_log = logging.getLogger(__name__)


class MetricsBackend:
    """0.3's base of metrics backends. Takes 0.3's arguments and calls and counts nothing; a warning says where the metrics are."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _log.warning("%s counts nothing: all metrics are at /metrics of the web service, which `agl-otel top` shows", type(self).__name__)

    def has_prometheus(self) -> bool:
        """Return False: the pages of metrics do not depend on a backend."""
        return False

    def register_counter(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def register_histogram(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    async def inc_counter(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    async def observe_histogram(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class ConsoleMetricsBackend(MetricsBackend):
    """0.3's backend that logged its metrics."""


class PrometheusMetricsBackend(MetricsBackend):
    """0.3's backend for Prometheus."""


class MultiMetricsBackend(MetricsBackend):
    """0.3's backend of several others."""
