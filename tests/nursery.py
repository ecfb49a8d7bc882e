"""Queues, collectors and commands that start at once: a process that has imported everything forks one for each start.

Imports are most of what a start takes a processor (0.5 s of a queue's 0.6, 1.1 of a collector's 2.0, 1.2 of a command's 1.3), and a run of
the tests starts hundreds. (chdb is imported after the fork: its threads would not survive one.)

What runs in the fork is the service's or the command's own main (or the code of a test that ends in it), in an environment, a folder and
with files for its output of its own; it ends as any interpreter does. `python -m tests.nursery SOCKET` reads one JSON object a line (a
Birth), and writes {"pid"} for each, and {"pid", "status"} when one has ended. At SOCKET it listens for tests/born.py, which stands for a
module that the code under test starts by itself (policies_by_forks).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from agl_otel.cli import COMMANDS
from agl_otel.service.interpreter import load_quickly
from agl_otel.service.processes import Process

ROOT: Final = Path(__file__).parents[1]
SERVICES: Final = ("queue", "collector")
MODULE: Final = "import runpy\nrunpy.run_module({!r}, run_name='__main__', alter_sys=True)\n"
COMMAND: Final = MODULE.format("agl_otel")
BORN: Final = Path(__file__).with_name("born.py")
POLICIES: Final = ("agl_otel.algorithms.grpo.server", "agl_otel.algorithms.sft.train")
WITH_TORCH: Final = ("agl_otel.algorithms.grpo.tiny", "agl_otel.algorithms.grpo.sampler", "agl_otel.algorithms.grpo.model_port")
"""What they import and a nursery therefore does before the first of them: 8 s of a processor."""
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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
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
        self._folder = tempfile.TemporaryDirectory()
        self.socket = f"{self._folder.name}/socket"
        command = [sys.executable, "-m", "tests.nursery", self.socket]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens
        self._born: SimpleQueue[int] = SimpleQueue()
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def spawn(
        self,
        code: str,
        environment: Mapping[str, str],
        log: Path,
        *,
        errors: Path | None = None,
        cwd: Path = ROOT,
        argv: Sequence[str] = (),
    ) -> Child:
        """A new process that runs `code`; what it prints goes to `log`, but for its errors where they have a file."""
        assert self._process.stdin is not None
        birth = Birth(code, dict(environment), str(cwd), [str(log), str(errors or log)], list(argv))
        print(json.dumps(asdict(birth)), file=self._process.stdin, flush=True)
        child = Child(self._born.get(timeout=120))
        with self._lock:
            self._children[child.pid] = child
            if child.pid in self._early:
                self._end(child, self._early.pop(child.pid))
        return child

    def service(self, name: str, environment: Mapping[str, str], log: Path) -> Child:
        """One of SERVICES: what `python -m agl_otel.NAME` is."""
        return self.spawn(f"import sys\nfrom agl_otel.{name}.__main__ import main\nsys.exit(main())\n", environment, log)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, cwd: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m agl_otel ARGUMENTS` to its end. Raises TimeoutExpired."""
        with tempfile.TemporaryDirectory() as place:
            out, errors = Path(place) / "out", Path(place) / "errors"
            argv = ["agl_otel", *arguments]
            child = self.spawn(COMMAND, environment, out, errors=errors, cwd=cwd, argv=argv)
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                raise
            return subprocess.CompletedProcess(argv, code, out.read_text(), errors.read_text())

    def close(self) -> None:
        """End it, and with it whatever it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._thread.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

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


@functools.cache
def nursery(*, with_torch: bool = False) -> Nursery:
    """The one of this process; or its other one, whose forks have torch: a service would say at its end what torch's bindings miss."""
    made = Nursery()
    atexit.register(made.close)
    return made


@dataclass(frozen=True)
class Birth:
    """What a fork is to be."""

    code: str
    environment: dict[str, str]
    cwd: str
    files: list[str]
    """For its output, and for its errors."""
    argv: list[str]

    def run(self, parent: int) -> None:
        """In the fork."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with the nursery
        if os.getppid() != parent:
            os._exit(1)
        for number, file in enumerate(self.files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = self.argv
        exec(self.code, {"__name__": "__main__"})


def born(module: str, *arguments: str) -> list[str]:
    """The command that is `python -m MODULE …` in a fork of the nursery that has torch."""
    return [sys.executable, "-S", "-E", str(BORN), nursery(with_torch=True).socket, module, *arguments]


@contextmanager
def policies_by_forks() -> Generator[None]:
    """Model servers and trainings that this process starts are forks of the nursery that has torch."""
    usual: Any = Process.__dict__["python_module"]

    def python_module(kind: type[Process], name: str, module: str, *arguments: str, **given: Any) -> Process:
        process = usual.__func__(kind, name, module, *arguments, **given)
        process.argv = born(module, *arguments) if module in POLICIES else process.argv
        return process

    Process.python_module = classmethod(python_module)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Process.python_module = usual


def forks(path: str) -> Iterator[Birth]:
    """Yields, in each fork, what it is to be; ends where nobody wants more: births come by stdin, and to the socket `path`."""
    running: dict[int, socket.socket | None] = {}  # {pid: who stands for it}
    ended, wake = os.pipe()
    for end in (ended, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("listening", flush=True)
    rest = b""
    while True:
        ready = select.select([0, ended, listener, *filter(None, running.values())], [], [])[0]
        born: list[tuple[Birth, socket.socket | None, list[int]]] = []
        if ended in ready:
            os.read(ended, 1 << 12)
            while running and (gone := os.waitpid(-1, os.WNOHANG))[0]:
                _tell(running.pop(gone[0]), gone[0], _END(gone[1]))
        for pid, stand_in in running.items():
            if stand_in in ready:  # it was killed
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            born.append(_called(listener))
        if 0 in ready:
            if not (data := os.read(0, 1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            born += [(Birth(**json.loads(line)), None, []) for line in lines]
        for birth, stand_in, files in born:
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                yield birth
                return
            running[pid] = stand_in
            _tell(stand_in, pid)
            for file in files:
                os.close(file)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _called(listener: socket.socket) -> tuple[Birth, socket.socket, list[int]]:
    """What somebody who is to stand for a fork wants."""
    stand_in, _ = listener.accept()
    files = list(socket.recv_fds(stand_in, 1, 2)[1])
    told = json.loads(stand_in.makefile().readline())
    if told["argv"][0] in POLICIES and "torch" not in sys.modules:
        for name in WITH_TORCH:  # not frozen: the last search for garbage must find what triton's bindings would print that they miss
            importlib.import_module(name)
    return Birth(MODULE.format(told["argv"][0]), files=[f"/proc/self/fd/{file}" for file in files], **told), stand_in, files


def _tell(stand_in: socket.socket | None, pid: int, status: int | None = None) -> None:
    """Who wanted it learns its id, and its end."""
    if stand_in is None:
        print(json.dumps({"pid": pid} if status is None else {"pid": pid, "status": status}), flush=True)
        return
    with suppress(OSError):  # it was killed
        stand_in.sendall(f"{pid if status is None else status}\n".encode())
    if status is not None:
        stand_in.close()


def main() -> None:
    """Fork on demand until stdin ends."""
    load_quickly()
    for name in (*(f"agl_otel.{name}.__main__" for name in SERVICES), *(place.partition(":")[0] for place in COMMANDS.values())):
        importlib.import_module(name)
    gc.freeze()
    me = os.getpid()
    for birth in forks(sys.argv[1]):
        birth.run(me)
        return


if __name__ == "__main__":
    main()
