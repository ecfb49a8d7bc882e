"""A queue service as a process that a test can kill, freeze and restart on the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl_otel.settings import free_port

ROOT = Path(__file__).parents[2]
SHIFTED_CLOCK = """
import os, time
_time, _shift = time.time, float(os.environ["SHIFT_SECONDS"])
time.time = lambda: _time() + _shift
"""


def wrong_clock(folder: Path, seconds: float) -> dict[str, str]:
    """Return the environment of a Python process whose clock is ahead by `seconds`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    return {"PYTHONPATH": str(folder), "SHIFT_SECONDS": str(seconds)}


class Child:
    """A process of a test, with a log; `end` leaves nothing behind."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = command
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self.process is not None, "it is not started"
        return self.process.pid

    async def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self.command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; return the exit code."""
        if self.process is None:
            return 0
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        return await self.process.wait()


class QueueProcess(Child):
    """`python -m agl_otel.queue` on `url`."""

    def __init__(self, url: str, folder: Path, *, environment: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> None:
        self.port = free_port()
        settings = {"AGL_QUEUE_URL": url, "AGL_QUEUE_PORT": str(self.port), "AGL_DATA_DIR": str(folder), "AGL_LOG_LEVEL": "WARNING"}
        command = [*before, sys.executable, "-m", "agl_otel.queue"]
        super().__init__(command, folder / f"queue-{self.port}.log", {**settings, **(environment or {})})

    @property
    def address(self) -> str:
        """Address as host:port."""
        return f"127.0.0.1:{self.port}"
