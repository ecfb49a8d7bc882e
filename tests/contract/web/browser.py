"""Scripts of Playwright in headless Chromium: Playwright has an environment of its own (it brings a Node.js), Chromium is the system's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.web.static import FOLDER
from tests.environments import AbsentError, installed

PLAYWRIGHT: Final = ("playwright==1.65.2",)


def built() -> None:
    """Skip the test where there is no dashboard."""
    if not (FOLDER / "index.html").exists():
        pytest.skip("the dashboard is not built: make web")


def look(script: str, given: dict[str, Any], *, seconds: float) -> None:
    """Run a script of this folder to its end; it gets `given` and the path of `chromium`. Skips the test where something is missing."""
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
