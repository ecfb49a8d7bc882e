"""Virtual environments that cannot be ours, made once in $XDG_CACHE_HOME/agl-otel/peers (default ~/.cache) and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LITELLM: Final = ("litellm[proxy]==1.106.2",)


class AbsentError(Exception):
    """Something that cannot run here, and why."""


def installed(name: str, packages: Sequence[str]) -> Path:
    """The environment `name` with these packages, made where it is missing. Raises AbsentError where it cannot be."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / "peers" / name
    mark = place / "complete"
    if not mark.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise AbsentError(f"{packages[0]} cannot be installed: {done.stderr.strip()[-300:]}")
        mark.touch()
    return place
