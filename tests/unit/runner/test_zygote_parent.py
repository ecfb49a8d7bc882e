"""A warm parent that cannot fork."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from agl_otel.runner.zygote.client import UnfitError, Zygote
from agl_otel.runner.zygote.program import Program

NO_FORK = "import errno, os\n\ndef fork():\n    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n\nos.fork = fork\n"


REFUSED = "import errno, os\n\ndef refuse(*_):\n    raise OSError(errno.EPERM, os.strerror(errno.EPERM))\n\nos.{call} = refuse\n"


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


def refuse(*_: object) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


async def test_without_memory_files_it_forks_by_temporary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a seccomp profile refuses memfd_create."""
    (tmp_path / "refused.py").write_text(REFUSED.format(call="memfd_create"))
    monkeypatch.setattr(os, "memfd_create", refuse)
    output = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    zygote = await Zygote.start(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)}, preload=["refused"], cwd=tmp_path)
    try:
        forked = await zygote.fork(Program("code", "print('ran')", ()), dict(os.environ), tmp_path, output, output)
        assert await forked.wait() == 0
        forked.release()
    finally:
        os.close(output)
        await zygote.close()
    assert (tmp_path / "output").read_text() == "ran\n"


async def test_without_pidfd_open_a_warm_parent_says_why_it_cannot_fork(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED.format(call="pidfd_open"))
    with pytest.raises(UnfitError, match="the system refuses pidfd_open"):
        await Zygote.start(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)}, preload=["refused"], cwd=tmp_path)
