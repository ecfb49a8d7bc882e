"""Pass variables that are too large for an environment by file: AGL_TASK and AGL_RESOURCES as AGL_TASK_FILE and AGL_RESOURCES_FILE."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agl_otel_hook import conventions

MAX_VARIABLE_BYTES: Final = 100_000  # Linux takes 131,072 bytes for one variable, its name included
_BY_FILE: Final = {conventions.ENV_TASK: conventions.ENV_TASK_FILE, conventions.ENV_RESOURCES: conventions.ENV_RESOURCES_FILE}


@contextmanager
def by_file(environment: dict[str, str]) -> Generator[dict[str, str]]:
    """Yield `environment` with its oversized variables moved to files, which are removed after the block."""
    large = {name: value for name, value in environment.items() if name in _BY_FILE and len(value.encode()) > MAX_VARIABLE_BYTES}
    if not large:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="agl-otel-") as folder:
        given = {name: value for name, value in environment.items() if name not in large}
        for name, value in large.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(value)
            given[_BY_FILE[name]] = str(path)
        yield given
