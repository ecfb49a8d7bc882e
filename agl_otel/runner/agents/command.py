"""Command agents: any program in any language, started once for each attempt.

Each process leads its own process group, so that its children end with it, and the kernel sends it SIGTERM when the runner is killed
(PDEATHSIG, set by util-linux's setpriv). A Python program may be forked from a warm parent instead (starting.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner import placeholders
from agl_otel.runner.environment import Addresses, process_environment
from agl_otel.runner.groups import end_detached, end_group, pids_with_attempt, register
from agl_otel.runner.injection import injection, install_line, is_off
from agl_otel.runner.job import Grader, Job, grade
from agl_otel.runner.limits import Limits
from agl_otel.runner.output import KEEP_BYTES, Capture
from agl_otel.runner.oversized import by_file
from agl_otel.runner.starting import AgentProcess, FreshStarter, Starter, WarmStarter, start_error
from agl_otel.types import LedgerReach
from agl_otel_hook import conventions

GRACE_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL: lets the hook flush
DRAIN_SECONDS: Final = 1.0  # for reading the rest of the output, in case another process holds the pipe open
_INSTRUMENT: Final = "opentelemetry-instrument"
_log = logging.getLogger(__name__)


class CommandAgent:
    """Runs `command` for each attempt; its stdout, stripped, is the answer.

    Args:
        command: program and arguments; `{name}` in an argument is filled from the task (placeholders.py).
        grader: (task, answer) → reward. Without one, only the agent's spans carry a reward.
        cwd: working directory; None: the runner's.
        env: variables added to the runner's. Those that identify the attempt cannot be overridden.
        instrument: whether the hook is brought into its Python processes (injection.py), and a Python program is started under
            opentelemetry-instrument. "auto": the latter if it is installed beside the interpreter.
        inject: whether OpenTelemetry is brought, too, into an interpreter without it.
        warm: whether an instrumented Python program is forked from a warm parent, which has instrumentation and libraries loaded;
            a program that cannot be forked is started afresh, and the reason is logged.
        preload: installed modules that the warm parent imports in addition to the program's top-level imports.
        hooked: whether its processes run under the hook; None: if they are instrumented here or by the command itself.
        limits: on memory and output; an attempt that exceeds one is ended and fails.
        grace_seconds: from SIGTERM to SIGKILL when the process has to end.

    Raises UsageError where the command is empty, not found, or cannot be instrumented as requested.
    """

    instrument: tuple[str, ...] = ()

    def __init__(
        self,
        command: Sequence[str],
        *,
        grader: Grader | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        instrument: bool | Literal["auto"] = "auto",
        inject: bool = False,
        warm: bool = False,
        preload: Sequence[str] = (),
        hooked: bool | None = None,
        limits: Limits | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        if not command:
            raise UsageError("no command was given: write it after `--`, for example `-- python agent.py {question}`")
        self._base = {**os.environ, **(env or {})}
        self._cwd = Path(cwd) if cwd is not None else None
        self._command = _resolved(list(command), self._base, self._cwd)
        off = is_off(self._base)
        instrument = instrument if not off else False
        self._injected = injection(self._base, self._command, inject=inject) if off or instrument is not False else {}
        wrapper = wrapper_of(self._command, required=instrument is True, inject=inject) if instrument is not False else []
        forks = warm and instrument is not False and _is_python(self._command)
        if warm and not forks:
            _log.warning("%s is started afresh for each attempt: only Python under the hook can be forked from a warm parent", command[0])
        self._starter: Starter = WarmStarter(FreshStarter(wrapper), preload) if forks else FreshStarter(wrapper)
        self.hooked = hooked if hooked is not None else bool(wrapper) or is_instrumented(self._command)
        self._grader = grader
        self._limits = limits or Limits()
        self._grace_seconds = grace_seconds

    def prepare(self, addresses: Addresses) -> None:
        """Do nothing: each process gets its own environment."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task cannot fill the command's placeholders."""
        placeholders.check(self._command, task)

    async def run(self, job: Job) -> None:
        """Run the command and grade its answer. Raises AgentError with the exit code and the error that it printed where it failed."""
        argv = placeholders.fill(self._command, job.rollout.input)
        env = process_environment(self._base, job.rollout, job.resources, job.addresses, traceparent=job.traceparent, token=job.token)
        env |= self._injected
        if job.ledgers is not None:
            env[conventions.ENV_LEDGER] = str(job.ledgers.root)
        stdout, stderr = Capture("stdout"), Capture("stderr")
        job.captures += [stdout, stderr]
        with by_file(env) as env:
            code = await self._execute(*self.launch(argv, env), stdout, stderr, job)
        if code != 0:
            raise AgentError(f"{self._ending(code)}{_quoted(stderr.error_lines() or stdout.error_lines())}")
        if self._grader is None:
            return
        if stdout.cut_bytes:
            raise AgentError(f"the agent printed {stdout.total_bytes} bytes: answers over {KEEP_BYTES} bytes are not graded")
        await grade(job, self._grader, stdout.text().strip())

    def launch(self, argv: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and environment to start, given the attempt's filled command and environment."""
        return argv, env

    async def _execute(self, argv: list[str], env: dict[str, str], stdout: Capture, stderr: Capture, job: Job) -> int:
        """Run the process and return its exit status; end its group in every case, also on cancellation."""
        async with contextlib.AsyncExitStack() as stack:
            pipes = [await _Pipe.open(capture, stack) for capture in (stdout, stderr)]
            try:
                process = await self._starter.start(argv, env, self._cwd, pipes[0].write_end, pipes[1].write_end)
            except (OSError, ValueError) as error:  # e.g. the environment is too long, an argument holds a NUL, the folder is missing
                raise start_error(error, env) from error
            finally:
                for pipe in pipes:
                    pipe.close_write_end()
            register(process.pid)
            try:
                code = await self._limits.enforce(process, (stdout, stderr))
            finally:
                await asyncio.shield(self._end(process, job))
                with contextlib.suppress(TimeoutError):  # a process that left the group may hold the pipe open
                    async with asyncio.timeout(DRAIN_SECONDS):
                        await asyncio.gather(*(pipe.closed.wait() for pipe in pipes))
            return code

    async def _end(self, process: AgentProcess, job: Job) -> None:
        """End the group, and detached processes found by the attempt's ledger or by its id in their environment."""

        def detached() -> set[int]:
            in_ledger = job.ledgers.running(job.key) if job.ledgers is not None else set[int]()
            return in_ledger | pids_with_attempt(job.attempt_id)

        try:
            await end_group(process, self._grace_seconds)
        finally:
            await end_detached(detached, self._grace_seconds)
            self._starter.release(process)

    @property
    def reach(self) -> LedgerReach:
        """Whether its processes run under the hook."""
        return "hooked" if self.hooked else "unhooked"

    @property
    def description(self) -> str:
        """The command, with its placeholders."""
        return " ".join(self._command)

    async def close(self) -> None:
        """End the warm parent, if there is one."""
        await self._starter.close()

    def _ending(self, code: int) -> str:
        program = Path(self._command[0]).name
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{program} was ended by {signal.Signals(-code).name}"
        return f"{program} ended with exit code {code}"


def is_instrumented(command: Sequence[str]) -> bool:
    """Return whether the command starts its program under opentelemetry-instrument."""
    return bool(command) and Path(command[0]).name == _INSTRUMENT


def wrapper_of(command: list[str], *, required: bool = False, inject: bool = False) -> list[str]:
    """Return the words to put before `command` so that it is instrumented: its interpreter's opentelemetry-instrument, or none.

    Only the one beside the interpreter will do: another would bring the packages of another environment. For a command that is not a
    Python program, or has none beside it, the list is empty (the latter is logged, unless OpenTelemetry is brought by `inject`);
    with `required`, UsageError is raised.
    """
    program = Path(command[0])
    if is_instrumented(command):
        return []
    if not _is_python(command):
        if required:
            raise UsageError(f"{command[0]} is not a Python program: start it under {_INSTRUMENT} in the command itself")
        return []
    wrapper = program.parent / _INSTRUMENT
    if wrapper.exists():
        return [str(wrapper)]
    message = f"{program} has no {_INSTRUMENT} beside it: {install_line()} into its environment"
    if required:
        raise UsageError(message)
    if not inject:
        _log.info("%s, or bring OpenTelemetry there with --inject: unless it has an SDK, the agent's own spans are missing", message)
    return []


def _is_python(command: Sequence[str]) -> bool:
    return Path(command[0]).name.startswith("python")


class _Pipe:
    """A pipe whose read end feeds a capture. asyncio's own pipes would delay `Process.wait` until they are closed."""

    def __init__(self, write_end: int) -> None:
        self.write_end = write_end
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, capture: Capture, stack: contextlib.AsyncExitStack) -> _Pipe:
        read_end, write_end = os.pipe()
        pipe = cls(write_end)
        stack.callback(pipe.close_write_end)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _Reader(capture, pipe.closed), os.fdopen(read_end, "rb"))
        stack.callback(transport.close)
        return pipe

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1


class _Reader(asyncio.Protocol):
    def __init__(self, capture: Capture, closed: asyncio.Event) -> None:
        self._capture = capture
        self._closed = closed

    def data_received(self, data: bytes) -> None:
        self._capture.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()


def _resolved(command: list[str], env: Mapping[str, str], cwd: Path | None) -> list[str]:
    """Resolve the path of the command's program. A bare `python` that is not on the PATH means the runner's interpreter."""
    program = command[0]
    if "/" in program:
        path = (cwd or Path()).absolute() / program
        found = str(path) if path.is_file() and os.access(path, os.X_OK) else None
    else:
        found = shutil.which(program, path=env.get("PATH"))
    if found is None and program in ("python", "python3"):
        found = sys.executable
    if found is None:
        raise UsageError(f"there is no program {program!r}{'' if '/' in program else ' on the PATH'} that can be executed")
    return [found, *command[1:]]


def _quoted(lines: str) -> str:
    return f": {lines}" if lines else " and printed nothing"
