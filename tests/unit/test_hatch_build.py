from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_cargo_the_core_is_not_built_and_the_remedy_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "hatch_build.py")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "no cargo on the PATH: install Rust (https://rustup.rs)" in done.stderr and "Traceback" not in done.stderr


def test_a_cargo_without_a_toolchain_is_one_line(tmp_path: Path) -> None:
    """As rustup's, in a home where none was chosen."""
    cargo = tmp_path / "cargo"
    cargo.write_text('#!/bin/sh\nfor line in 1 2 3; do echo "backtrace $line" >&2; done\nexit 1\n')
    cargo.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "hatch_build.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (1, [done.stderr.rstrip("\n")])
    assert "cargo does not run" in done.stderr and "rustup default stable" in done.stderr
