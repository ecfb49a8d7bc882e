"""Apply OTEL_CONFIG_FILE (OpenTelemetry's declarative configuration) and add our exporters to those of the file.

With this variable the SDK ignores all other OTEL_* variables and sets up what the file describes, which has no exporter to the stack, or
nothing if the package opentelemetry-configuration is not installed. So the hook applies the file, with every span sampled and no value
truncated. If that is impossible (no package, a broken file, one without tracing), it logs that and goes on as if the variable were not set.
A provider that others have set up from the file gets our exporters and sampler; its attribute limits stay, as they cannot be changed later.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from agl_otel_hook.guard import note_failure

VARIABLE: Final = "OTEL_CONFIG_FILE"
CONFIGURATOR: Final = "OTEL_PYTHON_CONFIGURATOR"
"""Names the configurator that a process runs. A name that does not exist leaves the set-up to the hook: without the package, the
configurator of an installed distribution would fail, and with it all of `opentelemetry-instrument`, the hook included."""


def is_set() -> bool:
    """Return whether OTEL_CONFIG_FILE is set."""
    return bool(os.environ.get(VARIABLE))


def set_up(attributes: int) -> bool:
    """Set up the SDK from the file, with a limit of `attributes` on each span. Return whether it sets up tracing. Never raises."""
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
def hidden() -> Generator[None]:
    """Remove OTEL_CONFIG_FILE from the environment for the block."""
    path = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if path is not None:
            os.environ[VARIABLE] = path  # the agent's own code may read it
