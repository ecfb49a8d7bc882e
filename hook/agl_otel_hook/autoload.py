"""`opentelemetry-instrument` loads every instrumentation at the start; those of waiting.py wait for their library there, too.

It checks versions and OTEL_PYTHON_DISABLED_INSTRUMENTATIONS as always, and then asks the distribution to load an instrumentation. That
request is what waits; a distribution that has a way of its own to load keeps it. What goes wrong later is logged in the words that it would
have been logged in, and goes no further.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from opentelemetry.instrumentation.dependencies import DependencyConflictError
from opentelemetry.instrumentation.distro import BaseDistro
from opentelemetry.util._importlib_metadata import EntryPoint

from agl_otel_hook import waiting
from agl_otel_hook.guard import never_raises

_log: Final = logging.getLogger("opentelemetry.instrumentation.auto_instrumentation._load")
_load: Final = BaseDistro.load_instrumentor


@never_raises
def begin() -> None:
    """From now on instrumentations that can wait do."""
    BaseDistro.load_instrumentor = _load_or_wait


@never_raises
def end() -> None:
    """From now on all are loaded when that is asked for."""
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
    except Exception:  # noqa: BLE001 - the boundary: what fails here would fail the agent's import
        _log.exception("Instrumenting of %s failed", name)
