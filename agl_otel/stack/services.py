"""The services of a stack as a table: how each is started, where it listens, and which of them settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agl_otel.service.processes import Process
from agl_otel.settings import Settings
from agl_otel.stack import otelcol


@dataclass(frozen=True)
class Service:
    """How one service is started and asked whether it is well."""

    name: str
    module: str
    port: str
    """The Settings field of the port where it says it is well; empty: it listens nowhere, and is well while it runs."""
    ports: tuple[str, ...]
    """All ports it listens on."""
    scheme: str = "http://"
    early: bool = False
    """Whether it must be well before the next one starts."""
    start: Callable[[Settings, Path], otelcol.Start] | None = None
    """For what is no module of ours: its command and environment."""

    def process(self, settings: Settings, *, log: Path) -> Process:
        """Its process, not started yet."""
        if self.start is None:
            return Process.python_module(self.name, self.module, log=log, settings=settings)
        argv, environment = self.start(settings, log.parents[1])
        return Process(self.name, argv, log=log, env=environment)


_QUEUE: Final = Service("queue", "agl_otel.queue", "queue_port", ("queue_port",), scheme="", early=True)
_OTLP_PORTS: Final = ("otlp_grpc_port", "otlp_http_port")
_OTHERS: Final = (
    Service("proxy", "agl_otel.proxy", "proxy_port", ("proxy_port",)),
    Service("web", "agl_otel.web", "web_port", ("web_port",)),
    Service("maintain", "agl_otel.cli.maintain", "", ()),
)
SERVICES: Final = (
    _QUEUE,
    Service("collector", "agl_otel.collector", "otlp_http_port", (*_OTLP_PORTS, "clickhouse_port")),
    *_OTHERS,
)
"""In the order of their start; they stop in the opposite one."""
OTELCOL_SERVICES: Final = (
    _QUEUE,
    Service("sql", "agl_otel.collector.sql", "clickhouse_port", ("clickhouse_port",), early=True),
    Service("collector", "", "otlp_http_port", _OTLP_PORTS, start=otelcol.start),
    *_OTHERS,
)
"""With the OpenTelemetry Collector as the collector. The schema is there (sql) before it writes."""
ANNOUNCED: Final = {"clickhouse": "collector", "proxy": "proxy", "web": "web"}
"""{address in types.Describe: the service that announces it}."""


def services_of(settings: Settings, only: Sequence[str] = ()) -> list[Service]:
    """The services that `settings` ask for; `only` those with these names, and what they cannot do without. Raises SettingsError."""
    if not settings.collector:
        return [service for service in SERVICES if not only or service.name in only]
    otelcol.check(settings)
    return [service for service in OTELCOL_SERVICES if not only or service.name in (*only, "sql")]
