"""A warm parent that cannot fork."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agl_otel.runner.zygote.client import UnfitError, Zygote
from agl_otel.runner.zygote.program import Program

NO_FORK = "import errno, os\n\ndef fork():\n    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n\nos.fork = fork\n"


def descriptors(pid: int) -> list[str]:
    return sorted(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())


async def test_a_failed_fork_leaves_no_open_descriptors(tmp_path: Path) -> None:
    (tmp_path / "no_fork.py").write_text(NO_FORK)
    output = os.open(os.devnull, os.O_WRONLY)
    zygote = await Zygote.start(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)}, preload=["no_fork"], cwd=tmp_path)
    try:
        before = descriptors(zygote.pid)
        for _ in range(5):  # more than LEARNING_RUNS
            with pytest.raises(UnfitError, match=r"fork failed: .*temporarily unavailable"):
                await zygote.fork(Program("code", "pass", ()), {}, tmp_path, output, output)
        assert descriptors(zygote.pid) == before
    finally:
        os.close(output)
        await zygote.close()
