"""Defer the instrumentations of waiting.py under `opentelemetry-instrument`, which loads every instrumentation at the start.

It checks versions and OTEL_PYTHON_DISABLED_INSTRUMENTATIONS as always and then calls the distribution's `load_instrumentor`. That call is
deferred, unless the distribution overrides the method. Errors of a deferred call are logged as `opentelemetry-instrument` logs them, and
not raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from opentelemetry.instrumentation.distro import BaseDistro
from opentelemetry.util._importlib_metadata import EntryPoint

from agl_otel_hook import waiting
from agl_otel_hook.guard import never_raises
from agl_otel_hook.versions import DependencyConflictError

_log: Final = logging.getLogger("opentelemetry.instrumentation.auto_instrumentation._load")
_load: Final = BaseDistro.load_instrumentor


@never_raises
def begin() -> None:
    """Defer from now on the instrumentations that can wait."""
    BaseDistro.load_instrumentor = _load_or_wait


@never_raises
def end() -> None:
    """Load all instrumentations immediately from now on."""
    BaseDistro.load_instrumentor = _load


def _load_or_wait(self: BaseDistro, entry_point: EntryPoint, **kwargs: Any) -> None:
    load = partial(_load, self, entry_point, **kwargs)
    if not waiting.wait(entry_point.module, partial(_load_late, entry_point.name, load)):
        load()


def _load_late(name: str, load: Callable[[], None]) -> None:
    try:
        load()
        _log.debug("Instrumented %s", name)
    except DependencyConflictError as error:
        _log.error(str(error))
    except ModuleNotFoundError as error:
        _log.debug("Skipping instrumentation %s: %s", name, error.msg)
    except ImportError:
        _log.exception("Importing of %s failed, skipping it", name)
    except Exception:  # noqa: BLE001 - the boundary: an error here would fail the agent's import
        _log.exception("Instrumenting of %s failed", name)
