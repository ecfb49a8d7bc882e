"""Virtual environments that cannot be ours, made once in $XDG_CACHE_HOME/agl-otel/peers (default ~/.cache) and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.one_certificate import downloading

ROOT: Final = Path(__file__).parents[1]
LITELLM: Final = ("litellm[proxy]==1.106.2",)


class AbsentError(Exception):
    """Something that cannot run here, and why."""


def installed(name: str, packages: Sequence[str]) -> Path:
    """The environment `name` with these packages, made where it is missing. Raises AbsentError where it cannot be."""
    place = _peers() / name
    mark = place / "complete"
    if not mark.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=downloading())
            if done.returncode:
                raise AbsentError(f"{packages[0]} cannot be installed: {done.stderr.strip()[-300:]}")
        mark.touch()
    return place


def over_ours(name: str, pins: Path) -> Path:
    """An environment with the packages that `pins` names, over those of our own; its Python. Raises AbsentError where it cannot be made.

    What both have is that of `pins`: so a package that wants another version of something does not need a second torch.
    """
    version = hashlib.sha256(pins.read_bytes() + sys.prefix.encode() + sys.version.encode()).hexdigest()[:16]
    place = _peers() / f"{name}-{version}"
    python = place / "bin" / "python"
    mark = place / "complete"
    if not mark.exists():
        uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
        install = ("pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", str(python), "-r", str(pins))
        for command in ([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], [uv, *install]):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=downloading())
            if done.returncode:
                raise AbsentError(f"the packages of {pins.name} cannot be installed: {done.stderr.strip()[-300:]}")
        (below,) = (place / "lib").glob("python3*/site-packages")
        (below / "zz_ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        mark.touch()
    return python


def _peers() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / "peers"
