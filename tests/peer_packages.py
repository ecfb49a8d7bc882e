"""A folder with the packages of tests/peers.txt (trl, datasets, tinker), for the PYTHONPATH of a process that reads what we wrote.

They stand beside our own environment, which has torch, transformers and pyarrow, and not in it, because nothing of ours needs them. The
folder in $AGL_TEST_PEERS, else it is made once, in $XDG_CACHE_HOME/agl-otel (default ~/.cache), and kept: 75 MB. Without a network tests
that need it are skipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.one_certificate import downloading

ROOT: Final = Path(__file__).parents[1]
WANTED: Final = ROOT / "tests" / "peers.txt"


def peer_packages() -> Path:
    """The folder; skips the test where there can be none."""
    if given := os.environ.get("AGL_TEST_PEERS"):
        return Path(given)
    version = hashlib.sha256(WANTED.read_bytes() + sys.version.encode()).hexdigest()[:16]
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / "peers" / f"trainers-{version}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=place.parent))
        uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
        command = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--compile-bytecode",
            "--python",
            sys.executable,
            "--target",
            str(making),
            "-r",
            str(WANTED),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=downloading())
        if done.returncode:
            shutil.rmtree(making)
            pytest.skip(f"the packages of {WANTED.name} cannot be installed: {done.stderr.strip()[-300:]}")
        if place.exists():  # another test process was faster
            shutil.rmtree(making)
        else:
            making.rename(place)
    return place
