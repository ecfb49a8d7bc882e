"""Virtual environments that cannot be ours, made once in $XDG_CACHE_HOME/agl-otel/peers (default ~/.cache) and kept."""

from __future__ import annotations

import fcntl
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
UNHOOKED: Final = {
    "sdk and instrumentation": ("", "openai==3.52.0", "opentelemetry-sdk==1.45.2", "opentelemetry-instrumentation-openai==0.62.4"),
    "the oldest sdk": ("3.10", "openai==2.9.0", "opentelemetry-sdk==1.33.0"),
    "nothing": ("3.13", "openai==3.52.0"),
}
"""{what an agent's environment has of OpenTelemetry: (Python, empty for ours; packages)}; of ours it has nothing."""


class AbsentError(Exception):
    """Something that cannot run here, and why."""


def installed(name: str, packages: Sequence[str], python: str = sys.executable) -> Path:
    """The environment `name` with these packages, made where it is missing. Raises AbsentError where it cannot be.

    uv makes it in a few seconds of a processor, where venv and pip take half a minute.
    """
    place = _peers() / name
    _make(place, ["--python", _python_of(place), *packages], packages[0], python=python)
    return place


def hooked(name: str, packages: Sequence[str], python: str) -> Path:
    """The environment of an agent: `packages`, and of ours nothing but the hook of this checkout; its Python. Raises AbsentError."""
    hook = ROOT / "hook"
    asked = "\n".join((python, str(hook), (hook / "pyproject.toml").read_text(), *packages))
    place = _peers() / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    _make(place, ["--python", _python_of(place), "--editable", str(hook), *packages], name, python=python)
    return Path(_python_of(place))


def unhooked(name: str, *more: str) -> Path:
    """The Python of an environment of UNHOOKED, with `more` packages. Raises AbsentError."""
    python, *packages = UNHOOKED[name]
    place = "-".join(("unhooked", *name.split(), *more))
    return installed(place, [*packages, *more], other_python(python) if python else sys.executable) / "bin" / "python"


def other_python(version: str) -> str:
    """An interpreter of a version, e.g. "3.10", from the PATH or of pyenv. Raises AbsentError where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for found in (shutil.which(f"python{version}"), *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))):
        if found and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
            return found
    raise AbsentError(f"there is no Python {version} here")


def over_ours(name: str, pins: Path) -> Path:
    """An environment with the packages that `pins` names, over those of our own; its Python. Raises AbsentError where it cannot be made.

    What both have is that of `pins`: so a package that wants another version of something does not need a second torch.
    """
    version = hashlib.sha256(pins.read_bytes() + sys.prefix.encode() + sys.version.encode()).hexdigest()[:16]
    place = _peers() / f"{name}-{version}"
    arguments = ["--no-deps", "--compile-bytecode", "--python", _python_of(place), "-r", str(pins)]
    _make(place, arguments, pins.name, ours=sysconfig.get_path("purelib"))
    return Path(_python_of(place))


def _make(place: Path, arguments: Sequence[str], what: str, *, ours: str = "", python: str = sys.executable) -> None:
    """Make the environment unless it is there: `uv pip install ARGUMENTS`, and with the packages of the folder `ours` behind its own."""
    mark = place / "complete"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as lock:  # test files run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            return
        uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
        for command in (["venv", "--clear", "--python", python, str(place)], ["pip", "install", *arguments]):
            done = subprocess.run([uv, *command, "--quiet"], capture_output=True, text=True, check=False, env=downloading())
            if done.returncode:
                raise AbsentError(f"{what} cannot be installed: {done.stderr.strip()[-300:]}")
        if ours:
            (below,) = (place / "lib").glob("python3*/site-packages")
            (below / "zz_ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        mark.touch()


def _python_of(place: Path) -> str:
    return str(place / "bin" / "python")


def _peers() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel" / "peers"
