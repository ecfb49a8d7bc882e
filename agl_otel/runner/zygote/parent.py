"""The warm process: waits for requests, forks, reports the exit statuses of its children. Single-threaded, without attempt state.

It ends when its runner closes the socket, or on SIGTERM: its children's groups get SIGTERM, and SIGKILL after a grace period.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, Final, NoReturn

from agl_otel.runner.zygote import child, learned, protocol, warming
from agl_otel.runner.zygote.program import Program
from agl_otel.service.forked import die_with_parent

GRACE_SECONDS: Final = 5.0
LEARNING_RUNS: Final = 3  # number of forks that report what they loaded


class _SigtermError(Exception):
    """SIGTERM was received."""


class Parent:
    """Serves the requests that arrive on `control`."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._imports: list[str] = setup["imports"]
        self._preload: list[str] = setup["preload"]
        self._learn_all: bool = setup["learn_all"]
        self._children: dict[int, tuple[int, int | None]] = {}
        """{pid: (pidfd, descriptor of the memory file for its Learner's result)}."""
        self._selector = selectors.DefaultSelector()
        self._learning = LEARNING_RUNS

    def run(self) -> None:
        """Load instrumentation and modules, report readiness, serve until the runner is gone."""
        warming.instrument_parent()
        warming.preload(self._imports)
        try:
            warming.preload_named(self._preload)
        except Exception as error:  # noqa: BLE001 - user code: reported, and the agents run without forks
            self._send(op="ready", unfit=f"a module to preload raised {type(error).__name__}: {error}")
            return
        self._freeze()
        self._send(op="ready", unfit=warming.unfit(self._control))
        self._selector.register(self._control, selectors.EVENT_READ)
        try:
            while self._serve():
                pass
        except _SigtermError:
            pass
        finally:
            self._end_children()

    def _serve(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is not self._control:
                self._exited(key.data)
                continue
            packet, descriptors, _, _ = socket.recv_fds(self._control, protocol.MAX_PACKET_BYTES, 3)
            if not packet:
                return False
            message = protocol.decode(packet)
            if message["op"] == "fork":
                self._fork(message["id"], *descriptors)
            else:
                self._release(message["pid"])
        return True

    def _fork(self, number: int, stdout: int, stderr: int, request: int) -> None:
        reason = warming.unfit(self._control)
        if reason is not None:
            for fd in (stdout, stderr, request):
                os.close(fd)
            self._send(op="refused", id=number, why=reason)
            return
        arguments = protocol.read_memory_file(request)
        learn = protocol.empty_file() if self._learning > 0 else None
        self._learning -= 1
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (stdout, stderr, learn):
                if fd is not None:
                    os.close(fd)
            self._send(op="refused", id=number, why=f"fork failed: {error}")
            return
        if pid == 0:
            self._run_child(arguments, stdout, stderr, learn, parent)
        os.close(stdout)
        os.close(stderr)
        fd = os.pidfd_open(pid)
        self._children[pid] = (fd, learn)
        self._selector.register(fd, selectors.EVENT_READ, pid)
        self._send(op="forked", id=number, pid=pid)

    def _run_child(self, arguments: dict[str, Any], stdout: int, stderr: int, learn: int | None, parent: int) -> NoReturn:
        try:
            die_with_parent(parent)
            self._selector.close()
            self._control.close()
            for fd, memory in self._children.values():
                os.close(fd)
                if memory is not None:
                    os.close(memory)
            child.take_over(stdout, stderr)
            child.run(Program.from_json(arguments["program"]), arguments["environment"], arguments["cwd"], learn)
        finally:
            os._exit(70)

    def _exited(self, pid: int) -> None:
        """Report the status of a child that has ended; it stays a zombie until it is released."""
        fd, memory = self._children[pid]
        self._selector.unregister(fd)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "its pidfd was readable"
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._send(op="exited", pid=pid, status=status)
        if memory is not None:
            self._children[pid] = (fd, None)
            if (result := protocol.read_memory_file(memory)) is not None:
                self._learn(result)

    def _learn(self, result: dict[str, list[str]]) -> None:
        """Load and build what a fork did, so that the next ones need not."""
        warming.preload(result["modules"] if self._learn_all else warming.of_packages(result["modules"], self._imports))
        learned.build_models(result["models"])
        learned.make_contexts(result["ca_files"])
        self._freeze()

    def _release(self, pid: int) -> None:
        fd, memory = self._children.pop(pid, (-1, None))
        if fd < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)
        os.close(fd)
        if memory is not None:
            os.close(memory)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def _freeze(self) -> None:
        """Exclude loaded objects from garbage collection, which would make forks copy their pages."""
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the runner is gone: the loop notices next
            self._control.send(protocol.encode(**message))

    def _end_children(self) -> None:
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
            alive = [pid for pid in self._children if _signal_group(pid, number)]
            deadline = time.monotonic() + seconds
            while alive and time.monotonic() < deadline:
                time.sleep(0.02)
                alive = [pid for pid in alive if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None]
            if number == signal.SIGTERM and not alive:
                for pid in self._children:  # the rest of its group
                    _signal_group(pid, signal.SIGKILL)
                return


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Run the warm parent; the entry point that client.py starts."""

    def received(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a killed runner causes one per thread (PDEATHSIG)
        raise _SigtermError

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(os.environ.pop(protocol.CONTROL_FD)))
    setup = protocol.read_memory_file(int(os.environ.pop(protocol.SETUP_FD)))
    os.set_inheritable(control.fileno(), False)
    sys.argv[:] = ["agl-otel-zygote"]
    Parent(control, setup).run()
