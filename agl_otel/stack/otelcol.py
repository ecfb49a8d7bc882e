"""The OpenTelemetry Collector as a service of the stack: the binary that `make otelcol` builds, with deploy/otelcol/all-in-one.yaml.

It writes to a ClickHouse server directly. It gets passwords by its environment; clients do not need them, since they query the SQL
endpoint (collector/sql.py). TLS is configured by a second file.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from agl_otel.errors import SettingsError
from agl_otel.settings import Settings, free_port
from agl_otel.traces.address import SCHEMES, ServerAddress

CONFIG: Final = Path("deploy", "otelcol", "all-in-one.yaml")
OVERLAY: Final = "otelcol-tls.json"
LOOPBACK: Final = "127.0.0.1"
_TUNED: Final = ("AGL_OTELCOL_FLUSH", "AGL_OTELCOL_IDLE", "AGL_OTELCOL_RETRY")  # variables of its own, for which there is no setting
_REPLACEMENTS: Final = {
    "metrics": "without metrics, take its pipeline out of deploy/otelcol",
    "max_span_attributes": "a span is cut down by its size (max_item_bytes)",
    "wal_budget_bytes": "it has no log on disk, its exporter's sending_queue bounds what waits for ClickHouse",
    "disk_reserve_bytes": "it keeps nothing on disk but the journal of resends",
    "log_format": "its own is service::telemetry::logs::encoding",
}
"""{setting of the Python collector: what replaces it here}."""
_LEVELS: Final = {"WARNING": "warn"}
_logger = logging.getLogger(__name__)
Start = tuple[list[str], dict[str, str]]
"""A command and its environment."""


def check(settings: Settings) -> None:
    """Raise SettingsError if the settings' collector cannot be started; warn of settings that it ignores."""
    if not os.access(settings.collector, os.X_OK):
        raise SettingsError(
            f"AGL_COLLECTOR names {settings.collector}, which is no program here: `make otelcol` builds build/otelcol/agl-otelcol"
        )
    if settings.clickhouse_db.partition("://")[0] not in SCHEMES:
        raise SettingsError(
            "the OpenTelemetry Collector writes to a ClickHouse server: name one with --clickhouse clickhouse://… (AGL_CLICKHOUSE_URL)"
        )
    if settings.forward_otlp:
        raise SettingsError("AGL_FORWARD_OTLP is for the Python collector: give the OpenTelemetry Collector an exporter of its own instead")
    if settings.mask:
        raise SettingsError(
            "AGL_MASK is for the Python collector: give the OpenTelemetry Collector a redaction or transform processor (docs/masking.md), "
            "or mask with `agl-otel export --mask`"
        )
    for name in ignored_settings(settings):
        _logger.warning("AGL_%s is for the Python collector and does nothing here: %s", name.upper(), _REPLACEMENTS[name])
    configuration()


def ignored_settings(settings: Settings) -> list[str]:
    """Return the settings that differ from their defaults but are ignored by this collector."""
    return [name for name in _REPLACEMENTS if getattr(settings, name) != Settings.model_fields[name].default]


def configuration() -> Path:
    """Return the path of the configuration file, in the checkout or in the installed package."""
    here = Path(__file__).resolve().parents[1]
    for base in (here.parent, here):
        if (base / CONFIG).exists():
            return base / CONFIG
    raise SettingsError(f"{CONFIG} is not beside this package: install agl-otel again")


def start(settings: Settings, data_dir: Path) -> Start:
    """Return the command and environment. With TLS, write the second configuration file into `data_dir`."""
    argv = [str(Path(settings.collector).absolute()), "--config", str(configuration())]
    overlay = data_dir / OVERLAY
    if settings.tls_cert:
        overlay.write_text(json.dumps(tls_overlay(settings), indent=2) + "\n")
        argv += ["--config", str(overlay)]
    return argv, environment(settings)


def environment(settings: Settings) -> dict[str, str]:
    """Return its variables (collector/otelcol/README.md)."""
    scheme = "https" if settings.tls_cert else "http"
    return {
        **settings.environment(),
        **{name: os.environ[name] for name in _TUNED if name in os.environ},
        "AGL_STORE": settings.queue_address.rpartition("://")[2],
        "AGL_OTELCOL_CLICKHOUSE": exporter_url(ServerAddress.parse(settings.clickhouse_db)),
        "AGL_OTELCOL_ANNOUNCE_GRPC": f"{'https://' if settings.tls_cert else ''}{settings.announced_host}:{settings.otlp_grpc_port}",
        "AGL_OTELCOL_ANNOUNCE_HTTP": f"{scheme}://{settings.announced_host}:{settings.otlp_http_port}",
        "AGL_OTELCOL_ANNOUNCE_CLICKHOUSE": f"{scheme}://{settings.announced_host}:{settings.clickhouse_port}",
        "AGL_OTELCOL_UNIDENTIFIED": "drop" if settings.unidentified == "drop" else "keep",  # the late pass adopts
        "AGL_OTELCOL_LOG_LEVEL": _LEVELS.get(settings.log_level, settings.log_level.lower()),
        "AGL_OTELCOL_ADMIN_HOST": LOOPBACK,  # its other two ports have neither authentication nor TLS
        "AGL_OTELCOL_HEALTH_PORT": str(free_port(LOOPBACK)),
        "AGL_OTELCOL_METRICS_PORT": str(free_port(LOOPBACK)),
    }


def exporter_url(address: ServerAddress) -> str:
    """Return the ClickHouse exporter's URL, with the Python writer's settings for clusters; it does not know this package's options."""
    options = {"secure": "true"} if address.secure else {}
    options |= {"distributed_foreground_insert": "1"} if address.cluster else {}
    options |= {"insert_quorum": address.insert_quorum} if address.insert_quorum else {}
    user = f"{quote(address.user, safe='')}:{quote(address.password, safe='')}"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"clickhouse://{user}@{host}:{address.port}{f'?{urlencode(options)}' if options else ''}"


def tls_overlay(settings: Settings) -> dict[str, Any]:
    """Return the configuration for TLS, on both OTLP ports and on the connection to the queue."""
    serving = {"cert_file": _path(settings.tls_cert), "key_file": _path(settings.tls_key)}
    if settings.tls_client_ca:
        serving["client_ca_file"] = _path(settings.tls_client_ca)
    names = {"ca_file": settings.tls_ca, "cert_file": settings.tls_client_cert, "key_file": settings.tls_client_key}
    queue = {"queue": {"tls": {"insecure": False, **{name: _path(path) for name, path in names.items() if path}}}}
    return {
        "receivers": {"otlp": {"protocols": {"grpc": {"tls": serving}, "http": {"tls": serving}}}},
        "processors": {"agentlightning": queue},
        "extensions": {"agentlightning": queue},
    }


def _path(path: str) -> str:
    return str(Path(path).absolute())
