"""Run Playwright scripts in headless Chromium: Playwright in its own environment (it needs Node.js), Chromium from the system."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.web.static import FOLDER
from tests.environments import AbsentError, installed

SOURCES: Final = FOLDER.parent / "dashboard" / "src"
PLAYWRIGHT: Final = ("playwright==1.65.2",)


def built() -> None:
    """Skip the test if the dashboard is not built from its present sources."""
    page = FOLDER / "index.html"
    if not page.exists():
        pytest.skip("the dashboard is not built: make web")
    newest = max(path.stat().st_mtime for path in SOURCES.rglob("*") if path.is_file())
    if newest > page.stat().st_mtime:
        pytest.skip("the dashboard's sources are newer than its build: make web")


def look(script: str, given: dict[str, Any], *, seconds: float) -> None:
    """Run a script of this folder with `given` and the path of Chromium. Skips the test if Playwright or Chromium is missing."""
    built()
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    try:
        python = installed("playwright", PLAYWRIGHT) / "bin" / "python"
    except AbsentError as reason:
        pytest.skip(str(reason))
    command = [str(python), str(Path(__file__).with_name(script)), json.dumps({**given, "chromium": chromium})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
