"""Child processes: started with their own log file and process group, watched, and ended by their own ids.

A child inherits no AGL_* variables; it gets the settings passed to it (`Settings.environment`), for a module of this package those of
this process by default. Children get SIGTERM when their parent dies for any reason, so that none is left behind. They have their own
process group: Ctrl+C in a terminal reaches only the parent, which then stops its children gracefully.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

from agl_otel.errors import UnavailableError
from agl_otel.service.private import make_folder, open_file, original_umask
from agl_otel.settings import Settings, without_settings

STARTER: Final = "agl_otel.service.interpreter"  # runs a module as python -m does
TAIL_BYTES: Final = 4000
AFTERMATH: Final = ("nanobind: ", " - leaked ", " - ... skipped remainder", "See https://nanobind.")
"""How lines begin that torch's compiler writes when a process ends, after the error that ended it."""
HEALTH_POLL_SECONDS: Final = 0.05
_live: set[Process] = set()


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """Wrap a command so that the kernel sends it SIGTERM when its parent ends; unchanged if util-linux is missing.

    It is a separate program because the parent has threads, so no Python code may run between fork and exec.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--", *argv] if setpriv else list(argv)


async def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    stdin: int = asyncio.subprocess.DEVNULL,
    cwd: Path | None = None,
    umask: int = -1,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a command as leader of a new session and process group, without input by default; it ends with this process. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *die_with_parent(argv),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
        umask=umask,
        pass_fds=pass_fds,
    )


def signal_group(group: int, number: int) -> bool:
    """Signal a process group; return whether it held a process that this one may signal. Signal 0 only checks; group 0 is ignored."""
    if group <= 0:  # for killpg 0 would be this process's own group
        return False
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def python_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that runs a module of this package: this process's, without its settings, and the given ones."""
    return {**without_settings(os.environ), "PYTHONUNBUFFERED": "1", **given}


class Started(Protocol):
    """A running child, as asyncio.subprocess.Process and a fork have it."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait for its end; return the exit status."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """Send a signal. Raises ProcessLookupError."""


class Process:
    """One child process. `python_module` builds the usual kind: a module of this package under the same interpreter."""

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.env = {**without_settings(os.environ), **(env or {})}
        self.cwd = cwd
        self._umask = -1
        self._process: Started | None = None

    @classmethod
    def python_module(
        cls, name: str, module: str, *arguments: str, log: Path, settings: Settings | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Describe a process that runs `python -m module` with this interpreter and `settings` (default: as this process loads them)."""
        given = python_environment({**(settings or Settings.load()).environment(), **(env or {})})
        made = cls(name, [sys.executable, "-m", STARTER, str(os.getpid()), module, *arguments], log=log, env=given)
        made._umask = original_umask()  # it sets its own umask and passes this one to agents
        return made

    @property
    def pid(self) -> int:
        """The process id; 0 before `start`."""
        return self._process.pid if self._process else 0

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs and before `start`."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; its output is appended to its log file."""
        make_folder(self.log.parent)
        self._process = await self._spawn()
        _live.add(self)

    async def _spawn(self) -> Started:
        with open_file(self.log, "ab") as out:
            return await spawn(self.argv, stdout=out, stderr=out, env=self.env, cwd=self.cwd, umask=self._umask)

    async def wait(self) -> int:
        """Wait for its end; return its exit status."""
        assert self._process is not None, "start() comes first"
        code = await self._process.wait()
        _live.discard(self)
        return code

    async def ready(self, healthy: Callable[[], Awaitable[bool]], *, timeout_seconds: float) -> None:
        """Wait until `healthy` returns true. Raises UnavailableError with the end of its log if it ends or takes too long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    well = await healthy()
                    self.check_running()  # the answer may come from another service that took the port first
                    if well:
                        return
                    await asyncio.sleep(HEALTH_POLL_SECONDS)
        except TimeoutError:
            raise UnavailableError(f"{self.name} did not answer within {timeout_seconds:.0f} s; see {self.log}. {self.log_end()}") from None

    def check_running(self) -> None:
        """Raise UnavailableError with the end of its log if it has ended."""
        if not self.running:
            raise UnavailableError(f"{self.name} {how_ended(self.returncode)}: {self.log_end()}")

    def log_end(self) -> str:
        """Return the end of its log, without empty lines."""
        return end_of(self.log)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.running and self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, *, grace_seconds: float) -> None:
        """End the process by SIGTERM, and after `grace_seconds` by SIGKILL to its whole process group."""
        if not self.running:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and its process group."""
        if self.running:
            signal_group(self.pid, signal.SIGKILL)
            await self.wait()


def how_ended(code: int | None) -> str:
    """Say how a process ended, by its exit code; negative: the number of the signal that killed it."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


def end_of(log: Path) -> str:
    """Return the last lines of a log, without empty ones and AFTERMATH; an empty string if it does not exist."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip() and not line.startswith(AFTERMATH)][-5:])


def kill_all() -> None:
    """Kill all running children with their process groups and descendants (on the second Ctrl+C).

    The agents of a runner lead groups of their own, and the SIGTERM that they get at its death may be ignored.
    """
    children = {process.pid for process in list(_live) if process.running}
    below = _descendants(children)
    for child in children:
        signal_group(child, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pids: Collection[int]) -> set[int]:
    """Return the children of these processes, their children and so on; none if the system is not Linux."""
    children: dict[int, list[int]] = {}
    for pid, _, parent, _ in stats():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [*pids]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def stats() -> Generator[tuple[int, str, int, int]]:
    """Yield (pid, state, parent, process group) of all processes; none if the system is not Linux."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            pid = int(stat.parent.name)
            state, parent, group, *_ = _stat(pid)
            yield pid, state, int(parent), int(group)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Raises OSError if it has ended or the system is not Linux."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether this process is running; a zombie does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return _stat(pid)[0] not in ("Z", "X")
    except OSError:  # not Linux, or it has just ended
        return not Path("/proc/self").exists()


def began(pid: int) -> int:
    """Return when a process began, in clock ticks since the start of the system; 0 if it has ended or the system is not Linux.

    A process id is given again after a while; with the time it names one process.
    """
    try:
        return int(_stat(pid)[19])
    except OSError:
        return 0


def environment_of(pid: int) -> frozenset[bytes]:
    """Return the variables (NAME=value) that a process of this user was started with; none if it has ended or the system is not Linux."""
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()
