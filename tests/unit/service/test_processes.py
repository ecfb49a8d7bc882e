from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.errors import UnavailableError
from agl_otel.service.processes import Process, is_alive, signal_group


async def test_an_ended_process_is_not_ready_even_if_another_answers(tmp_path: Path) -> None:
    process = Process("mine", [sys.executable, "-c", "print('port 1 is in use')"], log=tmp_path / "mine.log")

    async def another_answers() -> bool:
        await process.wait()
        return True

    await process.start()
    with pytest.raises(UnavailableError, match=r"mine ended with exit code 0: port 1 is in use"):
        await process.ready(another_answers, timeout_seconds=60)


def test_a_process_that_was_not_started_has_no_group_to_signal(tmp_path: Path) -> None:
    assert not signal_group(Process("mine", ["true"], log=tmp_path / "mine.log").pid, signal.SIGKILL)


def test_a_zombie_process_is_not_alive() -> None:
    assert is_alive(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie still
    assert not is_alive(ended.pid)
    ended.wait()
    assert not is_alive(ended.pid)


async def test_a_python_module_runs_as_with_python_m_and_returns_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "__name__, __spec__.name, sys.modules['__main__'].__spec__.name, sys.argv, gc.get_threshold()[0]"
    code = f"import gc, sys; print({shown}); sys.exit(7)"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    process = Process.python_module("mine", "mine", "-m", "x", log=tmp_path / "log")
    await process.start()
    assert await process.wait() == 7
    assert (tmp_path / "log").read_text() == f"__main__ mine mine ['{tmp_path}/mine.py', '-m', 'x'] 20000\n"


async def test_a_module_whose_parent_ended_before_it_began_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("open('it ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)  # of the parent that it had
        process = Process.python_module("mine", "mine", log=tmp_path / "log")
    await process.start()
    assert await process.wait() == 1 and not (tmp_path / "it ran").exists()
    assert (tmp_path / "log").read_text() == "mine does not begin: process 1, which started it, has ended\n"
