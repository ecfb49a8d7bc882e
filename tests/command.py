"""Commands of ours as a user starts them: each in a process of its own, which ends with the one that tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agl_otel.service.processes import die_with_parent

ROOT: Final = Path(__file__).parents[1]


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], *, cwd: Path = ROOT, seconds: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m agl_otel ARGUMENTS` to its end. Raises TimeoutExpired."""
    command = die_with_parent([sys.executable, "-m", "agl_otel", *arguments])
    return subprocess.run(
        command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
