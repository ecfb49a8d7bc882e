from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.errors import UnavailableError
from agl_otel.service.processes import Process, is_alive, on_stop_signals


async def heard(*numbers: signal.Signals, same_seconds: float) -> list[str]:
    """What is called when these signals reach this process, one by one."""
    called: list[str] = []

    def told(kind: str, number: signal.Signals) -> None:
        called.append(f"{kind} {number.name}")

    loop = asyncio.get_running_loop()
    on_stop_signals(lambda number: told("first", number), lambda number: told("again", number), same_seconds=same_seconds)
    passed = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, passed.set)
    try:
        for number in numbers:
            passed.clear()
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGUSR2)  # is heard after it
            await passed.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.remove_signal_handler(number)
    return called


async def test_a_process_that_ended_is_not_ready_whoever_answers_for_it(tmp_path: Path) -> None:
    process = Process("mine", [sys.executable, "-c", "print('port 1 is in use')"], log=tmp_path / "mine.log")

    async def another_answers() -> bool:
        await process.wait()
        return True

    await process.start()
    with pytest.raises(UnavailableError, match=r"mine ended with exit code 0: port 1 is in use"):
        await process.ready(another_answers, timeout_seconds=60)


async def test_signals_of_one_moment_are_one() -> None:
    assert await heard(*[signal.SIGTERM] * 5, same_seconds=3600) == ["first SIGTERM"]


async def test_a_second_ctrl_c_is_one_however_soon_it_comes() -> None:
    assert await heard(signal.SIGINT, signal.SIGTERM, signal.SIGINT, same_seconds=3600) == ["first SIGINT", "again SIGINT"]


async def test_a_later_signal_is_a_second_one() -> None:
    assert await heard(signal.SIGINT, signal.SIGTERM, same_seconds=0) == ["first SIGINT", "again SIGTERM"]


def test_a_process_that_nobody_waited_for_is_not_alive() -> None:
    assert is_alive(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie still
    assert not is_alive(ended.pid)
    ended.wait()
    assert not is_alive(ended.pid)


async def test_a_module_of_ours_runs_as_python_would_run_it_and_ends_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "__name__, __spec__.name, sys.modules['__main__'].__spec__.name, sys.argv, gc.get_threshold()[0]"
    code = f"import gc, sys; print({shown}); sys.exit(7)"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    process = Process.python_module("mine", "mine", "-m", "x", log=tmp_path / "log")
    await process.start()
    assert await process.wait() == 7
    assert (tmp_path / "log").read_text() == f"__main__ mine mine ['{tmp_path}/mine.py', '-m', 'x'] 20000\n"
