"""The runner's side of the zygote: start the warm parent, request forks, receive their exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import agl_otel
from agl_otel.errors import AgentError
from agl_otel.runner.injection import FOLDER
from agl_otel.runner.zygote import protocol
from agl_otel.runner.zygote.program import Program
from agl_otel.service.private import original_umask
from agl_otel.service.processes import signal_group, spawn

START_SECONDS: Final = 120.0  # imports on a busy machine
_BOOT: Final = f"""
import sys
sys.path[:] = [{FOLDER!r}, *filter(None, sys.path)]
import agl_otel_inject
del sys.path[0]
if sys.version_info < (3, 10) or not agl_otel_inject.bring({FOLDER!r}, agl_otel={str(Path(agl_otel.__file__).absolute().parents[1])!r}):
    sys.exit("its environment has no OpenTelemetry that the hook works with")
from agl_otel.runner.zygote.parent import main
main()
"""
_log = logging.getLogger(__name__)


class UnfitError(Exception):
    """The agent cannot be forked from a warm parent; the message gives the reason."""


@dataclass(slots=True, eq=False)
class ForkedProcess:
    """An agent's process that was forked from the warm parent. Implements starting.AgentProcess."""

    pid: int
    _zygote: Zygote
    _status: asyncio.Future[int] = field(repr=False)

    async def wait(self) -> int:
        """Wait until it has ended; return the exit status, negative for a signal."""
        return await asyncio.shield(self._status)

    def release(self) -> None:
        """Let the warm parent reap it, after its process group has ended."""
        self._zygote.release(self.pid)


class Zygote:
    """A warm parent, made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, log: IO[bytes]) -> None:
        self._process, self._control, self._log = process, control, log
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str | None] = self._loop.create_future()
        self._requests: dict[int, asyncio.Future[int]] = {}
        self._running: dict[int, asyncio.Future[int]] = {}
        self._number = 0
        self.alive = True
        """Whether the warm parent runs."""
        self._loop.add_reader(control.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        """The warm parent's process id."""
        return self._process.pid

    @classmethod
    async def start(
        cls, python: str, environment: Mapping[str, str], *, imports: Sequence[str] = (), preload: Sequence[str] = (),
        learn_all: bool = False, cwd: Path | None = None,
    ) -> Zygote:  # fmt: skip
        """Start a warm parent under the interpreter `python`. Raises UnfitError where it does not start or cannot be forked.

        It imports the installed modules of `imports`, all of `preload`, and later what its first forks have imported: with `learn_all`
        all of it, else only modules that belong to the packages of `imports`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = protocol.memory_file({"imports": list(imports), "preload": list(preload), "learn_all": learn_all})
        log = tempfile.TemporaryFile(prefix="agl-otel-zygote-")  # noqa: SIM115 - closed by close()
        try:
            process = await spawn(
                [shutil.which(python) or python, "-c", _BOOT],
                env={**environment, protocol.CONTROL_FD: str(theirs.fileno()), protocol.SETUP_FD: str(setup)},
                pass_fds=(theirs.fileno(), setup), stdout=log, stderr=log, cwd=cwd, umask=original_umask(),
            )  # fmt: skip
        except OSError as error:
            ours.close()
            log.close()
            raise UnfitError(f"the warm parent could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(setup)
        ours.setblocking(False)
        zygote = cls(process, ours, log)
        try:
            async with asyncio.timeout(START_SECONDS):
                unfit = await zygote._ready
        except TimeoutError:
            unfit = f"the warm parent was not ready within {START_SECONDS:.0f} s"
        except BaseException:
            await zygote.close()
            raise
        if unfit is not None:
            await zygote.close()
            raise UnfitError(unfit)
        return zygote

    async def fork(self, program: Program, environment: Mapping[str, str], cwd: Path, stdout: int, stderr: int) -> ForkedProcess:
        """Fork a process that runs `program`. Raises UnfitError where the warm parent has ended or must not be forked."""
        if not self.alive:
            raise UnfitError(f"the warm parent has ended{self.log_tail()}")
        self._number += 1
        number = self._number
        forked = self._requests[number] = self._loop.create_future()
        request = protocol.memory_file({"program": program.to_json(), "environment": dict(environment), "cwd": str(cwd)})
        try:
            socket.send_fds(self._control, [protocol.encode(op="fork", id=number)], [stdout, stderr, request])
            pid = await asyncio.shield(forked)
        except OSError as error:
            raise UnfitError(f"no request can be sent to the warm parent: {error}") from error
        except asyncio.CancelledError:
            forked.add_done_callback(self._kill_unused)
            raise
        finally:
            os.close(request)
        return ForkedProcess(pid, self, self._running[pid])

    def release(self, pid: int) -> None:
        """Let the warm parent reap a child that has ended."""
        self._running.pop(pid, None)
        if self.alive:
            with contextlib.suppress(OSError):
                self._control.send(protocol.encode(op="release", pid=pid))

    async def close(self) -> None:
        """End the warm parent and all its forks."""
        self._on_end("closed")
        self._control.close()
        self._log.close()
        await self._process.wait()

    def log_tail(self) -> str:
        """Return the last line that the warm parent has printed, for error messages."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""

    def _kill_unused(self, forked: asyncio.Future[int]) -> None:
        """Kill and release a fork whose requester was cancelled."""
        if forked.cancelled() or forked.exception() is not None:
            return
        pid = forked.result()
        signal_group(pid, signal.SIGKILL)
        self._running[pid].add_done_callback(lambda _: self.release(pid))

    def _on_readable(self) -> None:
        try:
            packet = self._control.recv(protocol.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._on_end(f"the warm parent has ended{self.log_tail()}")
            return
        message = protocol.decode(packet)
        _HANDLERS[message["op"]](self, message)

    def _on_ready(self, message: dict[str, Any]) -> None:
        if not self._ready.done():
            self._ready.set_result(message["unfit"])

    def _on_forked(self, message: dict[str, Any]) -> None:
        self._running[message["pid"]] = self._loop.create_future()
        self._requests.pop(message["id"]).set_result(message["pid"])

    def _on_refused(self, message: dict[str, Any]) -> None:
        self._requests.pop(message["id"]).set_exception(UnfitError(message["why"]))

    def _on_exited(self, message: dict[str, Any]) -> None:
        status = self._running.get(message["pid"])
        if status is not None and not status.done():
            status.set_result(message["status"])

    def _on_end(self, reason: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        if not self._ready.done():
            self._ready.set_result(reason)
        for forked in self._requests.values():
            if not forked.done():
                forked.set_exception(UnfitError(reason))
        for status in self._running.values():
            if not status.done():
                status.set_exception(AgentError(f"the agent's process ended with its warm parent: {reason}"))
                status.exception()  # marks it as retrieved: it may have no waiter


_HANDLERS: Final = {
    "ready": Zygote._on_ready,  # pyright: ignore[reportPrivateUsage]  # a table of the class's methods
    "forked": Zygote._on_forked,  # pyright: ignore[reportPrivateUsage]  # as above
    "refused": Zygote._on_refused,  # pyright: ignore[reportPrivateUsage]  # as above
    "exited": Zygote._on_exited,  # pyright: ignore[reportPrivateUsage]  # as above
}
