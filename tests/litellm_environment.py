"""The interpreter of an environment that has litellm, which cannot share ours.

The one in $AGL_TEST_LITELLM, else it is made once, in $XDG_CACHE_HOME/agl-otel (default ~/.cache), and kept. Without a network tests that
need it are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "litellm[proxy]==1.106.2"


def litellm_python() -> str:
    """The path of that interpreter; skips the test where there can be none."""
    if given := os.environ.get("AGL_TEST_LITELLM"):
        return given
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / "peers" / "litellm"
    python, mark = place / "bin" / "python", place / "complete"
    if not mark.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip()[-300:]}")
        mark.touch()
    return str(python)
