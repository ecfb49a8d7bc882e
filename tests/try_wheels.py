"""`make wheel`: try the wheels of dist/ in an empty environment of each Python, and that of dist/pure/, for every platform, in the newest.

A Python that is not on this machine is named and left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.environments import ROOT, AbsentError, other_python

LIMIT_SECONDS = 300


def main(uv: str) -> None:
    """Try all; raises CalledProcessError where one fails, SystemExit where no Python is here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [found[1] for line in project["classifiers"] if (found := re.fullmatch(r".* :: (3\.\d+)", line))]
    pythons: dict[str, str] = {}
    for version in versions:
        try:
            pythons[version] = other_python(version)
        except AbsentError as absent:
            print(f"not tried: {absent}")
    if not pythons:
        sys.exit(f"none of Python {', '.join(versions)} is here")
    dist = ROOT / "dist"
    compiled, pure = dist.glob("agl_otel-*.whl"), (dist / "pure").glob("agl_otel-*.whl")
    (hook,) = dist.glob("agl_otel_hook-*.whl")
    tries = [(version, wheel) for wheel in compiled for version in pythons] + [([*pythons][-1], wheel) for wheel in pure]
    for version, wheel in tries:
        with tempfile.TemporaryDirectory() as folder:
            python = str(Path(folder) / "env/bin/python")
            for command in (
                ["venv", "--python", pythons[version], f"{folder}/env"],
                ["pip", "install", "--python", python, str(wheel), str(hook)],
            ):
                subprocess.run([uv, *command, "--quiet"], check=True)
            environment = {**os.environ, "HOME": folder, "PATH": os.defpath}  # neither a checkout's programs nor settings of a home
            done = [python, "-I", str(ROOT / "tests" / "try_wheel.py"), str(ROOT)]
            print(f"Python {version}, {wheel.name}: ", end="", flush=True)
            subprocess.run(done, check=True, cwd=folder, env=environment, timeout=LIMIT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
