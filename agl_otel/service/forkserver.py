"""Forks services from a process that has imported them: the modules of a stack's services are imported, and held in memory, once.

`python -m agl_otel.service.forkserver MODULE…` imports the modules, reads requests from its standard input, and writes what happens to its
standard output, each a line of JSON. It runs nothing beside, which makes its forks safe (numpy's OpenBLAS ends its threads before a fork).
It ends with its input; the kernel then sends its forks SIGTERM.

A client that has one thread at its start, such as the supervisor, needs no server for its first services: it imports the modules and forks
them from itself, each to wait for its request (`ForkServer.prefork`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agl_otel.errors import UnavailableError
from agl_otel.service.forked import die_with_parent, set_name, start_session
from agl_otel.service.interpreter import tune_for_startup
from agl_otel.service.private import keep_private, make_folder, open_file, original_umask
from agl_otel.service.processes import HEALTH_POLL_SECONDS, Process, end_of, how_ended, is_alive, python_environment, spawn
from agl_otel.settings import Settings

MODULE: Final = "agl_otel.service.forkserver"
FORK_SECONDS: Final = 120.0  # mostly for importing torch on a busy machine
CAN_FORK: Final = sys.platform == "linux"
"""Whether services are forked: elsewhere system libraries do not bear it, and prctl(2) is missing."""


class Fork:
    """A process that a fork server has forked; the attributes of asyncio.subprocess.Process that processes.py uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status; negative: the signal that ended it."""

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        """Wait for its end; return the exit status."""
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError."""
        os.kill(self.pid, number)


class _Waiting(NamedTuple):
    """A fork that waits for its request, and the descriptor that takes it."""

    pid: int
    request: int


class ForkServer:
    """Forks processes: those of `prefork` first, then from a fork server, which is started when needed, and again when it has ended.

    Args:
        modules: what to import; each has a function `main` that returns an exit code.
        environment: the variables of the forks besides those of python_environment; None: this process's settings.
        log: gets what the server itself prints.
    """

    def __init__(self, modules: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path) -> None:
        self._modules = tuple(modules)
        self._environment = python_environment(Settings.load().environment() if environment is None else environment)
        self._log = log
        self._lock = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._children: list[Fork] = []
        """Those of `prefork` that have got their request, and run."""
        self._requests = -1
        """Descriptor of the pipe to the running server; -1: none runs."""
        self._server: asyncio.subprocess.Process | None = None
        """The server that was started last."""
        self.on_lost: Callable[[UnavailableError], object] = lambda _: None
        """Called when the server has ended by itself, and its forks with it, before they are known to have ended."""
        self._readers: set[asyncio.Task[None]] = set()
        self._forked: asyncio.Future[Fork] | None = None

    def prefork(self, count: int, modules: Sequence[str] | None = None) -> None:
        """Import the modules, and fork the next `count` processes from this one, which must have one thread and no event loop yet.

        Args:
            count: how many of the processes that are asked for later.
            modules: those that they need; all by default.

        Returns in this process only: in the forks SystemExit is raised at their end. Does nothing where CAN_FORK is false.
        """
        if not CAN_FORK:
            return
        _import(self._modules if modules is None else modules)
        parent = os.getpid()
        for _ in range(count):
            source, request = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()  # Ctrl-C is for the parent
                die_with_parent(parent)
                for descriptor in (request, *(each.request for each in self._waiting)):
                    os.close(descriptor)
                os.environ.clear()
                os.environ.update(self._environment)
                with os.fdopen(source, "rb") as requests:
                    line = requests.readline()
                sys.exit(_run(json.loads(line)) if line else 0)
            os.close(source)
            self._waiting.append(_Waiting(pid, request))

    def process(self, name: str, module: str, *arguments: str, log: Path) -> Process:
        """Return a process of one of the modules, not yet started: a fork, or where there are none `python -m module`."""
        if CAN_FORK:
            return _ForkedProcess(name, module, *arguments, server=self, log=log)
        return Process.python_module(name, module, *arguments, log=log, env=self._environment)

    async def begin(self) -> None:
        """Start the fork server ahead of the first request: it imports meanwhile. Raises OSError."""
        async with self._lock:
            if CAN_FORK and self._requests < 0:
                await self._start()

    async def fork(self, module: str, *arguments: str, log: Path) -> Fork:
        """Call `main` of a module in a fork of its own session, whose output is appended to `log`. Raises OSError, UnavailableError."""
        return await asyncio.shield(self._ask([module, *arguments], log))  # cancelled, it would leave its answer to the next request

    async def _ask(self, command: Sequence[str], log: Path) -> Fork:
        request = json.dumps({"command": command, "log": str(log)}).encode() + b"\n"
        async with self._lock:
            if self._waiting:
                return self._use(self._waiting.pop(0), request)
            if self._requests < 0:
                await self._start()
            self._forked = forked = asyncio.get_running_loop().create_future()
            with contextlib.suppress(BrokenPipeError):  # the end of its reports, too, tells that it has ended
                os.write(self._requests, request)
            if (await asyncio.wait({forked}, timeout=FORK_SECONDS))[0]:
                return forked.result()
            forked.cancel()
            await self._end()
            why = f"the process that is to be forked did not begin within {FORK_SECONDS:.0f} s; its log is {self._log}. {end_of(self._log)}"
            raise UnavailableError(why)

    def _use(self, waiting: _Waiting, request: bytes) -> Fork:
        """Give a waiting fork its request; an empty one ends it."""
        with contextlib.suppress(BrokenPipeError):  # it was killed, and the Fork tells
            os.write(waiting.request, request)
        os.close(waiting.request)
        fork = Fork(waiting.pid)
        self._children.append(fork)
        descriptor = os.pidfd_open(fork.pid)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, fork, descriptor)
        return fork

    def _reap(self, fork: Fork, descriptor: int) -> None:
        """Report the end of a child of this process."""
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._children.remove(fork)
        fork.ended.set_result(os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1]))

    async def _start(self) -> None:
        requests_read, requests = os.pipe()
        reports, reports_write = os.pipe()
        make_folder(self._log.parent)
        with open_file(self._log, "ab") as log:
            process = await spawn(
                [sys.executable, "-m", MODULE, *self._modules],
                stdin=requests_read,
                stdout=reports_write,
                stderr=log,
                env=self._environment,
                umask=original_umask(),
            )
        os.close(requests_read)
        os.close(reports_write)
        self._requests, self._server = requests, process
        reader = asyncio.create_task(self._read(reports, process.wait), name="fork server")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, descriptor: int, ended: Callable[[], Awaitable[int]]) -> None:
        """Follow the server's reports to its end."""
        reports = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reports)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, io.FileIO(descriptor))
        forks: dict[int, Fork] = {}
        async for line in reports:
            report: dict[str, int] = json.loads(line)
            if "status" in report:
                forks.pop(report["pid"]).ended.set_result(report["status"])
                continue
            forks[report["pid"]] = fork = Fork(report["pid"])
            if self._forked is not None and not self._forked.done():
                self._forked.set_result(fork)
        transport.close()
        is_lost = self._requests >= 0
        self._close_requests()
        pending, self._forked = self._forked, None  # from here on a request is for the next server
        code = await ended()
        why = f"{how_ended(code)}; its log is {self._log}. {end_of(self._log)}"
        if pending is not None and not pending.done():
            pending.set_exception(UnavailableError(f"the process that is to be forked {why}"))
        if is_lost and forks:
            self.on_lost(UnavailableError(f"the process of which they are forks {why}"))
        while forks:  # the kernel has sent them SIGTERM; nobody else reports their end
            for pid in [pid for pid in forks if not is_alive(pid)]:
                forks.pop(pid).ended.set_result(-signal.SIGTERM)
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    def _close_requests(self) -> None:
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    async def _end(self) -> None:
        """End the server, also while it imports; the kernel then sends its forks SIGTERM."""
        self._close_requests()
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
        await asyncio.gather(*self._readers)

    async def close(self) -> None:
        """End the server, and the forks that still run."""
        while self._waiting:
            self._use(self._waiting.pop(), b"")
        for child in self._children:
            child.send_signal(signal.SIGTERM)
        await self._end()
        await asyncio.gather(*(child.wait() for child in self._children))


class _ForkedProcess(Process):
    """A module in a fork of its own; `python -m module` runs the same."""

    def __init__(self, name: str, module: str, *arguments: str, server: ForkServer, log: Path) -> None:
        super().__init__(name, (module, *arguments), log=log)
        self._server = server

    async def _spawn(self) -> Fork:
        return await self._server.fork(*self.argv, log=self.log)


def _serve(reports: int) -> dict[str, Any] | None:
    """Fork for each request until the input ends; return None then, and in a fork its request. `reports`: descriptor that they go to."""
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written at the end of a child
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(ended_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == ended_read:
                    os.read(ended_read, 4096)
                    _report_ended(reports)
                    continue
                request = sys.stdin.buffer.readline()  # the client waits for the answer before it sends another
                if not request:
                    return None
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    die_with_parent(parent)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(ended_read)
                    os.close(ended_write)
                    os.close(reports)
                    return json.loads(request)
                _report(reports, pid=pid)


def _report_ended(reports: int) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _report(reports, pid=found[0], status=os.waitstatus_to_exitcode(found[1]))


def _report(reports: int, **fields: int) -> None:
    os.write(reports, json.dumps(fields).encode() + b"\n")


def _run(request: Mapping[str, Any]) -> int:
    """Become the process that was asked for; return its exit code."""
    module, *arguments = request["command"]
    keep_private()
    set_name(Path(request["log"]).stem)
    with open_file(Path(request["log"]), "ab") as log:
        start_session(log.fileno(), log.fileno())
    sys.argv[:] = [module, *arguments]
    return program(module).main()


def program(module: str) -> Any:
    """Import what `python -m module` would run: it has a function `main`, and a service's a context manager `serving`."""
    found = importlib.import_module(module)
    return importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found


def _import(modules: Sequence[str]) -> None:
    tune_for_startup()
    for module in modules:
        program(module)
    gc.collect()
    gc.freeze()  # else the first collection in a fork would copy the pages of all objects


def main() -> int:
    """Import the modules and serve, or in a fork run a service; return the exit code."""
    reports = os.dup(1)
    os.dup2(2, 1)  # what a module prints when it is imported is no report
    _import(sys.argv[1:])
    request = _serve(reports)
    return 0 if request is None else _run(request)


if __name__ == "__main__":
    sys.exit(main())
