"""The services of a stack as a table: how each is started, where it listens, and which of them the settings select."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agl_otel.service.forkserver import ForkServer
from agl_otel.service.processes import Process
from agl_otel.settings import Settings
from agl_otel.stack import otelcol


@dataclass(frozen=True)
class Service:
    """The start and the health check of one service."""

    name: str
    module: str
    port: str
    """The Settings field of the port of its health check; empty: it has no port, and is healthy while it runs."""
    ports: tuple[str, ...]
    """All ports it listens on."""
    scheme: str = "http://"
    early: bool = False
    """Whether it must be healthy before the next one starts."""
    within: str = ""
    """The service whose process it shares where both run."""
    start: Callable[[Settings, Path], otelcol.Start] | None = None
    """Returns the command and environment of a service that is not a module of this package."""

    def process(self, settings: Settings, *, forks: ForkServer, log: Path, together: Sequence[str] = ()) -> Process:
        """Return its process, not yet started, with the modules `together` in it; `forks` has the settings, too."""
        if together:
            return forks.process(self.name, TOGETHER, self.module, *together, log=log)
        if self.start is None:
            return forks.process(self.name, self.module, log=log)
        argv, environment = self.start(settings, log.parents[1])
        return Process(self.name, argv, log=log, env=environment)


TOGETHER: Final = "agl_otel.stack.together"
_QUEUE: Final = Service("queue", "agl_otel.queue", "queue_port", ("queue_port",), scheme="", early=True)
_OTLP_PORTS: Final = ("otlp_grpc_port", "otlp_http_port")
_OTHERS: Final = (
    Service("proxy", "agl_otel.proxy", "proxy_port", ("proxy_port",)),
    Service("web", "agl_otel.web", "web_port", ("web_port",), within="queue"),
    Service("maintain", "agl_otel.maintain", "", (), within="queue"),
)
SERVICES: Final = (
    _QUEUE,
    Service("collector", "agl_otel.collector", "otlp_http_port", (*_OTLP_PORTS, "clickhouse_port")),
    *_OTHERS,
)
"""In the order of their start; they stop in reverse order."""
OTELCOL_SERVICES: Final = (
    _QUEUE,
    Service("sql", "agl_otel.collector.sql", "clickhouse_port", ("clickhouse_port",), early=True),
    Service("collector", "", "otlp_http_port", _OTLP_PORTS, start=otelcol.start),
    *_OTHERS,
)
"""The services with the OpenTelemetry Collector as collector. `sql` creates the schema before that writes."""
REGISTERED: Final = {"clickhouse": "collector", "proxy": "proxy", "web": "web"}
"""{address in types.Describe: the service that registers it}."""


def services_of(settings: Settings, only: Sequence[str] = ()) -> list[Service]:
    """Return the services that `settings` select, or those named in `only` with the ones they require. Raises SettingsError."""
    if not settings.collector:
        return [service for service in SERVICES if not only or service.name in only]
    otelcol.check(settings)
    return [service for service in OTELCOL_SERVICES if not only or service.name in (*only, "sql")]
