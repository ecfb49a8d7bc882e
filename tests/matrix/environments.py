"""An environment for each framework, below build/matrix/: the framework as published, and this package beside it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.matrix.frameworks import Framework
from tests.one_certificate import downloading

ROOT: Final = Path(__file__).parents[2]
PLACE: Final = ROOT / "build" / "matrix"
INSTALL_SECONDS: Final = 900.0  # the first time downloads
_NODE_HOOK: Final = "node_modules/@opentelemetry/auto-instrumentations-node/build/src/register.js"


@dataclass(frozen=True)
class Environment:
    """Where a framework is installed."""

    command: tuple[str, ...]
    """The agent, without its arguments."""
    version: str
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


class CannotInstallError(Exception):
    """It cannot be installed; the message is the installer's reason."""


def environment(framework: Framework) -> Environment:
    """Install what the framework's folder asks for, unless that has been done. Raises CannotInstallError."""
    make = _node if (framework.folder / "package.json").exists() else _python
    folder = PLACE / framework.name
    wanted = "".join(path.read_text() for path in _asking(framework)) + (ROOT / "uv.lock").read_text()
    stamp = folder / f".complete-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    if not stamp.exists():
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
    return make(framework, folder, stamp)


def _asking(framework: Framework) -> list[Path]:
    names = ("requirements.txt", "overrides.txt", "package.json")
    return [path for name in names if (path := framework.folder / name).exists()]


def _python(framework: Framework, folder: Path, stamp: Path) -> Environment:
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    if not stamp.exists():
        _run(uv, "venv", "--quiet", "--python", "3.11", str(folder))
        into, asked = ("--python", str(folder / "bin" / "python")), framework.folder / "requirements.txt"
        if framework.is_harness:  # beside which only the hook is installed: many pin all that they need
            _run(uv, "pip", "install", "--quiet", *into, "-r", str(asked), "-e", str(ROOT / "hook"))
        else:
            _run(uv, "pip", "install", "--quiet", *into, "-r", str(asked), *_bounds(uv, framework, folder), "-e", str(ROOT))
        stamp.touch()
    python = str(folder / "bin" / "python")
    version = _run(python, "-c", f"from importlib.metadata import version; print(version({framework.package!r}))").strip()
    if framework.is_harness:
        return _harness(framework, folder / "bin", version)
    return Environment((python, str(framework.folder / framework.program)), version)


def _harness(framework: Framework, programs: Path, version: str) -> Environment:
    """The script that starts a command-line agent, with its programs first on the path."""
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return Environment(("bash", str(framework.folder / framework.program)), version, {"PATH": path})


def _bounds(uv: str, framework: Framework, folder: Path) -> list[str]:
    asked, overrides = framework.folder / "requirements.txt", framework.folder / "overrides.txt"
    own = folder / "constraints.txt"
    own.write_text(_locked(uv, asked.read_text() + (overrides.read_text() if overrides.exists() else "")))
    return ["-c", str(own), *(("--overrides", str(overrides)) if overrides.exists() else ())]


def _locked(uv: str, asked: str) -> str:
    """What our lock file pins, but for what the framework asks for itself: so that resolving takes seconds."""
    lock = _run(uv, "export", "--quiet", "--frozen", "--no-hashes", "--no-dev", "--no-emit-local", "--no-annotate", "--project", str(ROOT))
    names = {_name(line) for line in asked.splitlines() if line.strip() and not line.startswith("#")}
    return "".join(f"{line}\n" for line in lock.splitlines() if _name(line) not in names)


def _name(requirement: str) -> str:
    return re.split(r"[<>=~!\[ ;@]", requirement.strip())[0].lower().replace("_", "-")


def _node(framework: Framework, folder: Path, stamp: Path) -> Environment:
    if not shutil.which("npm") or not shutil.which("node"):
        raise CannotInstallError("npm and node are not installed")
    folder.mkdir(exist_ok=True)
    shutil.copy(framework.folder / framework.program, folder)  # Node finds packages beside the script
    if not stamp.exists():
        shutil.copy(framework.folder / "package.json", folder)
        scripts = () if framework.is_harness else ("--ignore-scripts",)  # by which harnesses install their programs
        _run("npm", "install", *scripts, "--no-audit", "--no-fund", "--silent", cwd=folder)
        stamp.touch()
    package = json.loads((folder / "node_modules" / framework.package / "package.json").read_text())
    if framework.is_harness:
        return _harness(framework, folder / "node_modules" / ".bin", package["version"])
    return Environment(("node", "--require", str(folder / _NODE_HOOK), str(folder / framework.program)), package["version"])


def _run(*command: str, cwd: Path | None = None) -> str:
    """Its standard output. Raises CannotInstallError with the end of its standard error."""
    env = {name: value for name, value in downloading().items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CannotInstallError(f"not installed within {INSTALL_SECONDS:.0f} s") from None
    if done.returncode:
        raise CannotInstallError(done.stderr.strip()[-600:])
    return done.stdout
