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
