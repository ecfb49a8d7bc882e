"""Reward 1.0 if the tests of the instance pass on a fresh repository with the patch, else 0.0. The agent never sees the tests."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from agent import git, write
from instances import INSTANCES


def grade(task: dict[str, Any], answer: str) -> float:
    instance = INSTANCES[task["instance"]]
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        write(folder, instance["files"])
        git(folder, "init", "--quiet")
        patch = subprocess.run(["git", "apply", "-"], cwd=folder, input=f"{answer}\n", text=True, capture_output=True, check=False)
        if not answer.strip() or patch.returncode:
            return 0.0
        write(folder, instance["tests"])
        tests = [subprocess.run([sys.executable, name], cwd=folder, capture_output=True, check=False) for name in instance["tests"]]
        return float(all(test.returncode == 0 for test in tests))
