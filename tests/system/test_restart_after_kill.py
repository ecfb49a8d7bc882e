"""`agl-otel train` with a stack of its own, killed by kill -9 and started again at once on the same data directory.

That a run then goes on as if nothing had happened, test_training_resumes.py shows.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.system.stack_process import DEMO, Command, alive, run_here, small_demo, until

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


SUPERVISOR = logging.getLogger("agl_otel.stack.supervisor")


class _Thaw(logging.Handler):
    """Lets the frozen services of a killed stack go on, and so end, once a stack says that it waits for them."""

    def __init__(self, services: list[int]) -> None:
        super().__init__()
        self.thawed: list[int] = []
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting up to" in record.getMessage():
            self.thawed = alive(self._services)
            self.release()

    def release(self) -> None:
        for pid in alive(self._services):
            os.kill(pid, signal.SIGCONT)


def test_a_restart_right_after_kill_9_does_not_join_the_dying_stack(
    tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cwd, data = small_demo(tmp_path / "cwd"), tmp_path / "data"
    job = cwd / DEMO / "job.toml"
    job.write_text(job.read_text().replace("max_steps = 200", "max_steps = 1"))
    shutil.copytree(tiny_policy, data / "run" / "policy")
    arguments = ["train", str(job), "--run-dir", str(data / "run"), "--data-dir", str(data), "--json"]
    with Command(*arguments, log=tmp_path / "first.log", cwd=cwd) as first:
        stack = data / "stack.json"
        until(lambda: stack.exists() or first.process.poll() is not None, "the stack is up")
        assert first.process.poll() is None, first.output
        services = [found["pid"] for found in json.loads(stack.read_text()).values() if isinstance(found, dict)]
        for pid in services:
            os.kill(pid, signal.SIGSTOP)  # however fast they would end, they are there when the second stack starts
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    thaw = _Thaw(services)
    SUPERVISOR.addHandler(thaw)
    try:
        again = run_here(capsys, *arguments, cwd=cwd)
    finally:
        SUPERVISOR.removeHandler(thaw)
        thaw.release()
    assert thaw.thawed == services, "the second stack waited for all services of the first one"
    assert again.returncode == 0, again.stderr[-4000:]
    assert json.loads(again.stdout)["steps"] == 1
