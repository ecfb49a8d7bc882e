"""Both cores of the collector, which must behave alike."""

from __future__ import annotations

import pytest

from agl_otel.collector.core import PythonCore, core

needs_compiled_core = pytest.mark.skipif(
    core().name != "compiled", reason="the compiled core is not built: `make setup` builds it with cargo"
)
both_cores = pytest.mark.parametrize(
    "used_core", [PythonCore(), pytest.param(core(), marks=needs_compiled_core)], ids=["python", "compiled"]
)
