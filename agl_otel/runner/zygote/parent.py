"""The warm process: waits for requests, forks, says how its children ended. One thread, nothing of an attempt in it.

It ends with its runner: when the socket closes, or at SIGTERM, its children's groups get SIGTERM, and SIGKILL after a grace.
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

GRACE_SECONDS: Final = 5.0
LEARNING_RUNS: Final = 3  # of how many runs the warm parent asks what else they loaded


class _SigtermError(Exception):
    """SIGTERM came."""


class Parent:
    """The loop around `control`."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._imports: list[str] = setup["imports"]
        self._preload: list[str] = setup["preload"]
        self._learn_all: bool = setup["learn_all"]
        self._children: dict[int, tuple[int, int | None]] = {}
        """{pid: (pidfd, memory file of what it loaded)}."""
        self._selector = selectors.DefaultSelector()
        self._learning = LEARNING_RUNS

    def run(self) -> None:
        """Get warm, say so, serve until the runner is gone."""
        warming.instrument_parent()
        warming.preload(self._imports)
        try:
            warming.preload_as_told(self._preload)
        except Exception as error:  # noqa: BLE001 - the user's module, named by the user: told, and the agents run without a fork
            self._say(op="ready", unfit=f"a module that was to be preloaded fails: {type(error).__name__}: {error}")
            return
        self._settle()
        self._say(op="ready", unfit=warming.unfit(self._control))
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
        why = warming.unfit(self._control)
        if why is not None:
            for fd in (stdout, stderr, request):
                os.close(fd)
            self._say(op="refused", id=number, why=why)
            return
        asked = protocol.read_memory_file(request)
        learn = os.memfd_create("agl-otel-learn") if self._learning > 0 else None
        self._learning -= 1
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._say(op="refused", id=number, why=f"fork failed: {error}")
            return
        if pid == 0:
            self._become(asked, stdout, stderr, learn, me)
        os.close(stdout)
        os.close(stderr)
        fd = os.pidfd_open(pid)
        self._children[pid] = (fd, learn)
        self._selector.register(fd, selectors.EVENT_READ, pid)
        self._say(op="forked", id=number, pid=pid)

    def _become(self, asked: dict[str, Any], stdout: int, stderr: int, learn: int | None, parent: int) -> NoReturn:
        try:
            child.die_with_parent(parent)
            self._selector.close()
            self._control.close()
            for fd, memory in self._children.values():
                os.close(fd)
                if memory is not None:
                    os.close(memory)
            child.take_over(stdout, stderr)
            child.run(Program.from_json(asked["program"]), asked["environment"], asked["cwd"], learn)
        finally:
            os._exit(70)

    def _exited(self, pid: int) -> None:
        """A child has ended: say how; it stays a zombie until it is released."""
        fd, memory = self._children[pid]
        self._selector.unregister(fd)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "its pidfd was readable"
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._say(op="exited", pid=pid, status=status)
        if memory is not None:
            self._children[pid] = (fd, None)
            if (told := protocol.read_memory_file(memory)) is not None:
                self._learn(told)

    def _learn(self, told: dict[str, list[str]]) -> None:
        """Do what a fork did, so that the next ones need not."""
        warming.preload(told["modules"] if self._learn_all else warming.of_packages(told["modules"], self._imports))
        learned.build_models(told["models"])
        learned.make_contexts(told["ca_files"])
        self._settle()

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

    def _settle(self) -> None:
        """Leave what is loaded out of garbage collection, so that forks do not copy it."""
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the runner is gone: the loop sees it next
            self._control.send(protocol.encode(**message))

    def _end_children(self) -> None:
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
            alive = [pid for pid in self._children if _signal_group(pid, number)]
            deadline = time.monotonic() + seconds
            while alive and time.monotonic() < deadline:
                time.sleep(0.02)
                alive = [pid for pid in alive if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None]
            if number == signal.SIGTERM and not alive:
                for pid in self._children:  # what its group has left behind
                    _signal_group(pid, signal.SIGKILL)
                return


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Entry point of `client.py`'s command line."""

    def received(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel sends one for each thread of a runner that was killed
        raise _SigtermError

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(os.environ.pop(protocol.CONTROL_FD)))
    setup = protocol.read_memory_file(int(os.environ.pop(protocol.SETUP_FD)))
    os.set_inheritable(control.fileno(), False)
    sys.argv[:] = ["agl-otel-zygote"]
    Parent(control, setup).run()
