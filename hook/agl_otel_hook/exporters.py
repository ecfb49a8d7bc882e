"""Create the exporters that OTEL_TRACES_EXPORTER and OTEL_LOGS_EXPORTER name.

OTLP over HTTP is sent by exporters of our own (otlp.py), which need no other package, and so is what should go over gRPC if its exporter is
missing and a runner has named the collector's HTTP address. All others are those that the SDK would load; one that is missing is logged.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

from opentelemetry.util._importlib_metadata import entry_points

from agl_otel_hook import conventions, otlp
from agl_otel_hook.guard import note_failure

Signal = Literal["traces", "logs"]
HTTP: Final = "otlp_proto_http"
GRPC: Final = "otlp_proto_grpc"
_BY_PROTOCOL: Final = {"grpc": GRPC, "http/protobuf": HTTP}
_OURS: Final = {"traces": otlp.SpanExporter, "logs": otlp.LogExporter}
_VARIABLES: Final = {"traces": "OTEL_TRACES_EXPORTER", "logs": "OTEL_LOGS_EXPORTER"}
NONE: Final = dict.fromkeys(_VARIABLES.values(), "none")
"""Variables with which the SDK creates no exporters."""


def configured(signal: Signal, *, only_otlp: bool = False) -> list[Any]:
    """Create the exporters of a signal, in the order in which the environment names them."""
    names = [name.strip() for name in os.environ.get(_VARIABLES[signal], "").split(",")]
    made = [_make(signal, name) for name in names if name.startswith("otlp") or not (only_otlp or name in ("", "none"))]
    return [exporter for exporter in made if exporter is not None]


def _make(signal: Signal, name: str) -> Any:
    """Create one exporter; None where it cannot be created, which is logged."""
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    name = _BY_PROTOCOL.get(protocol, name) if name == "otlp" else name
    found = None if name == HTTP else next(iter(entry_points(group=f"opentelemetry_{signal}_exporter", name=name)), None)
    try:
        if found is not None:
            return found.load()()
        if name in (HTTP, "otlp") or (name == GRPC and os.environ.get(conventions.ENV_OTLP_HTTP)):
            return _OURS[signal]()
    except Exception as error:  # noqa: BLE001 - the boundary: somebody else's exporter, or the user's settings of ours
        note_failure(_VARIABLES[signal], f"the exporter {name!r} cannot be created: {error!r}")
        return None
    remedy = ": pip install opentelemetry-exporter-otlp-proto-grpc into it, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    note_failure(_VARIABLES[signal], f"the agent's environment has no exporter {name!r}{remedy if name == GRPC else ''}")
    return None


@contextmanager
def in_environment(settings: Mapping[str, str]) -> Generator[None]:
    """Set these environment variables for the block, then restore the values that the agent had set."""
    now = {name: os.environ.get(name) for name, value in settings.items() if os.environ.get(name) != value}
    os.environ.update({name: settings[name] for name in now})
    try:
        yield
    finally:
        for name, value in now.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
