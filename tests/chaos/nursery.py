"""Collectors that start at once: a process that has imported everything forks one for each start. Imports are most of a start, and a
run of the scenarios starts hundreds. (chdb is imported after the fork: it has threads, which do not survive one.)

What runs in the fork is the collector's own main (or the code of a test that ends in it), on an environment and a log of its own.
`python -m tests.chaos.nursery` reads one JSON object a line, {"code", "environment", "log"}, and writes {"pid"} for each, and
{"pid", "status"} when one has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
MAIN: Final = "import sys\nfrom agl_otel.collector.__main__ import main\nsys.exit(main())\n"
_END: Final = os.waitstatus_to_exitcode


class Child:
    """A forked process, with the methods of subprocess.Popen that the stack uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises TimeoutExpired."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"collector {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.nursery"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._born: SimpleQueue[int] = SimpleQueue()
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def spawn(self, code: str, environment: Mapping[str, str], log: Path) -> Child:
        """A new process that runs `code`."""
        assert self._process.stdin is not None
        print(json.dumps({"code": code, "environment": dict(environment), "log": str(log)}), file=self._process.stdin, flush=True)
        child = Child(self._born.get(timeout=120))
        with self._lock:
            self._children[child.pid] = child
            if child.pid in self._early:
                self._end(child, self._early.pop(child.pid))
        return child

    def close(self) -> None:
        """End it, and with it whatever it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._thread.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "status" not in told:
                self._born.put(told["pid"])
                continue
            with self._lock:
                if (child := self._children.pop(told["pid"], None)) is not None:
                    self._end(child, told["status"])
                else:  # it ended before its birth was noted
                    self._early[told["pid"]] = told["status"]

    def _end(self, child: Child, status: int) -> None:
        self._children.pop(child.pid, None)
        child.returncode = status
        child.ended.set()


def _run(code: str, environment: Mapping[str, str], log: str, parent: int) -> None:
    """In the fork."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with the nursery
    if os.getppid() != parent:
        os._exit(1)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 - the last boundary of a process
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType] there is one
    os._exit(1)


def main() -> None:
    """Fork on demand until stdin ends."""

    import agl_otel.collector.__main__  # noqa: F401 # pyright: ignore[reportUnusedImport]

    me = os.getpid()
    running: set[int] = set()
    rest = b""
    while True:
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            print(json.dumps({"pid": ended[0], "status": _END(ended[1])}), flush=True)
        if not select.select([0], [], [], 0.01)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            wanted = json.loads(line)
            if (pid := os.fork()) == 0:
                _run(wanted["code"], wanted["environment"], wanted["log"], me)
            running.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
