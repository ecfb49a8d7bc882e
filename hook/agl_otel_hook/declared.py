"""What OTEL_CONFIG_FILE sets up (OpenTelemetry's declarative configuration), with our exporters beside the file's own.

The SDK then looks at no other OTEL_* variable: it sets up what the file says, which is no exporter to the stack, or nothing at all where
the package opentelemetry-configuration is not installed. So the file is set up here, every span sampled and whole, and what is of no use
(no package, a broken file, one that sets up no tracing) is left out with a message, as if the variable were not set. A provider that others
set up by the file gets the exporters and the sampler; its limits of attributes stay, which nobody may change from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal

from opentelemetry.util._importlib_metadata import entry_points

from agl_otel_hook.guard import note_failure

VARIABLE: Final = "OTEL_CONFIG_FILE"
CONFIGURATOR: Final = "OTEL_PYTHON_CONFIGURATOR"
"""Names the configurator that a process runs. One that nobody has leaves the set-up to the hook: with a distribution installed and the
package missing, the distribution's would fail, and with it all of `opentelemetry-instrument`, the hook included."""
_PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def named() -> bool:
    """Whether the environment names a file."""
    return bool(os.environ.get(VARIABLE))


def set_up(attributes: int) -> bool:
    """Set up the SDK as the file says, with room for so many attributes; False where that sets up no tracing. Never raises."""
    path = os.environ[VARIABLE]
    try:
        from opentelemetry.configuration import configure_sdk, load_config_file
        from opentelemetry.configuration.models import Sampler, SpanLimits

        config = load_config_file(path)
        tracing = config.tracer_provider
        if config.disabled or tracing is None:
            note_failure(VARIABLE, f"{path} switches tracing off: it is left out in an attempt, where every span counts")
            return False
        tracing.sampler = Sampler(always_on={})
        tracing.limits = replace(tracing.limits or SpanLimits(), attribute_count_limit=attributes, attribute_value_length_limit=None)
        if config.attribute_limits is not None:
            config.attribute_limits.attribute_value_length_limit = None
        configure_sdk(config)
    except ImportError:
        note_failure(
            VARIABLE, f"{path} is left out: pip install opentelemetry-configuration into the agent's environment to have it set up"
        )
        return False
    except Exception as error:  # noqa: BLE001 - the boundary: a user's file, and a package whose errors are its own
        note_failure(VARIABLE, f"{path} is left out, it cannot be set up: {error!r}")
        return False
    return True


@contextmanager
def left_out() -> Generator[None]:
    """Without the variable for the block."""
    path = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if path is not None:
            os.environ[VARIABLE] = path  # the agent's own code may read it


def otlp_exporters(signal: Literal["traces", "logs"]) -> list[Any]:
    """A new exporter for each `otlp…` of OTEL_TRACES_EXPORTER or OTEL_LOGS_EXPORTER, to where OTEL_EXPORTER_OTLP_ENDPOINT says."""
    names = [name.strip() for name in os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").split(",")]
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    wanted = [_PROTOCOLS.get(protocol, "otlp_proto_http") if name == "otlp" else name for name in names if name.startswith("otlp")]
    return [point.load()() for name in wanted for point in entry_points(group=f"opentelemetry_{signal}_exporter", name=name)]


def add_log_exporters(processor: Callable[[Any], Any]) -> None:
    """Have the logs of the file's provider, where it sets one up, come to the stack, too."""
    from opentelemetry._logs import get_logger_provider  # costs an agent without such a file a tenth of a second
    from opentelemetry.sdk._logs import LoggerProvider

    provider = get_logger_provider()
    if isinstance(provider, LoggerProvider):
        for exporter in otlp_exporters("logs"):
            provider.add_log_record_processor(processor(exporter))
