"""An agent that is a command: any program in any language, started once for each attempt.

It has a process group of its own, so that ending it ends what it started, and a kernel's promise (PDEATHSIG, by util-linux's setpriv)
that it gets SIGTERM when the runner is killed. A Python program may be a fork of a warm parent instead (starting.py).
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
from agl_otel.runner.groups import end_group, end_leftovers, named_in_environments, register
from agl_otel.runner.job import Grader, Job, grade
from agl_otel.runner.limits import Limits
from agl_otel.runner.output import KEEP_BYTES, Capture
from agl_otel.runner.oversized import by_file
from agl_otel.runner.starting import AgentProcess, Anew, Starter, Warm, refused
from agl_otel.types import LedgerReach
from agl_otel_hook import conventions

GRACE_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL: time for an agent's hook to flush
DRAIN_SECONDS: Final = 1.0  # how long output may still come from what outlives the agent's first process
_INSTRUMENT: Final = "opentelemetry-instrument"
_log = logging.getLogger(__name__)


class CommandAgent:
    """Runs `command` for each attempt; what it prints to stdout, stripped, is its answer.

    Args:
        command: program and arguments; `{name}` in an argument is filled from the task (placeholders.py).
        grader: (task, answer) → reward. Without one only the agent's own spans carry a reward.
        cwd: working directory; None means the runner's.
        env: variables on top of the runner's own. What identifies the attempt cannot be overridden.
        instrument: whether a Python program runs under opentelemetry-instrument. "auto": where that is installed beside its interpreter.
        warm: whether an instrumented Python program is run as a fork of a warm parent, which has instrumentation and libraries loaded;
            one that cannot be is started anew, and the log says why.
        preload: installed modules that the warm parent loads beside those that the program imports at its top.
        hooked: whether its processes run under our hook; None: where they are instrumented here, or the command itself says so.
        limits: of memory and output; an attempt that passes one is ended and fails.
        grace_seconds: from SIGTERM to SIGKILL when it has to end.

    Raises UsageError where the command is empty, is not there, or cannot be instrumented as asked.
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
        wrapper = wrapper_of(self._command, required=instrument is True) if instrument is not False else []
        self._starter: Starter = Warm(Anew(wrapper), preload) if warm and wrapper else Anew(wrapper)
        self.hooked = hooked if hooked is not None else bool(wrapper) or is_instrumented(self._command)
        self._grader = grader
        self._limits = limits or Limits()
        self._grace_seconds = grace_seconds

    def prepare(self, addresses: Addresses) -> None:
        """Nothing: each process gets an environment of its own."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task lacks what the command asks for."""
        placeholders.check(self._command, task)

    async def run(self, job: Job) -> None:
        """Run the command; grade its answer. Raises AgentError with the exit code and the last lines of stderr where it failed."""
        argv = placeholders.fill(self._command, job.rollout.input)
        env = process_environment(self._base, job.rollout, job.resources, job.addresses, traceparent=job.traceparent, token=job.token)
        if job.ledgers is not None:
            env[conventions.ENV_LEDGER] = str(job.ledgers.root)
        stdout, stderr = Capture("stdout"), Capture("stderr")
        job.captures += [stdout, stderr]
        with by_file(env) as given:
            code = await self._execute(*self.launch(argv, given), stdout, stderr, job)
        if code != 0:
            raise AgentError(f"{self._named(code)}{_quoted(stderr.last_lines() or stdout.last_lines())}")
        if self._grader is None:
            return
        if stdout.cut_bytes:
            raise AgentError(f"the agent printed {stdout.total_bytes} bytes: more than {KEEP_BYTES} are no answer to be graded")
        await grade(job, self._grader, stdout.text().strip())

    def launch(self, argv: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """What is started for an attempt, given its filled command and its environment."""
        return argv, env

    async def _execute(self, argv: list[str], env: dict[str, str], stdout: Capture, stderr: Capture, job: Job) -> int:
        """Run it to its end and give its exit status; when this is cancelled, end its group first."""
        async with contextlib.AsyncExitStack() as stack:
            pipes = [await _Pipe.open(capture, stack) for capture in (stdout, stderr)]
            try:
                process = await self._starter.start(argv, env, self._cwd, pipes[0].write_end, pipes[1].write_end)
            except (OSError, ValueError) as error:  # too long an environment, a NUL in an argument, no such folder
                raise refused(error, env) from error
            finally:
                for pipe in pipes:
                    pipe.close_write_end()
            register(process.pid)
            try:
                code = await self._limits.within(process, (stdout, stderr))
            finally:
                await asyncio.shield(self._end(process, job))
                with contextlib.suppress(TimeoutError):  # somebody who left the group holds the pipe
                    async with asyncio.timeout(DRAIN_SECONDS):
                        await asyncio.gather(*(pipe.closed.wait() for pipe in pipes))
            return code

    async def _end(self, process: AgentProcess, job: Job) -> None:
        """End the group, and what has left it and is named in the attempt's ledger, or names the attempt in its environment."""

        def leftovers() -> set[int]:
            named = job.ledgers.running(job.key) if job.ledgers is not None else set[int]()
            return named | named_in_environments(job.attempt_id)

        try:
            await end_group(process, self._grace_seconds)
        finally:
            await end_leftovers(leftovers, self._grace_seconds)
            self._starter.release(process)

    @property
    def reach(self) -> LedgerReach:
        """Whether its processes run under our hook."""
        return "hooked" if self.hooked else "unhooked"

    @property
    def shown(self) -> str:
        """The command, before anything is filled in."""
        return " ".join(self._command)

    async def close(self) -> None:
        """End the warm parent, where there is one."""
        await self._starter.close()

    def _named(self, code: int) -> str:
        program = Path(self._command[0]).name
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{program} was ended by {signal.Signals(-code).name}"
        return f"{program} ended with exit code {code}"


def is_instrumented(command: Sequence[str]) -> bool:
    """Whether the command itself starts its program under our hook."""
    return bool(command) and Path(command[0]).name == _INSTRUMENT


def wrapper_of(command: list[str], *, required: bool = False) -> list[str]:
    """What goes before `command` so that it is instrumented: nothing, or the opentelemetry-instrument of its interpreter.

    The one beside its interpreter is taken: another would bring the packages of another environment. Where there is none, or the
    command is no Python program, nothing (with a warning, or UsageError where `required`).
    """
    program = Path(command[0])
    if is_instrumented(command):
        return []
    if not program.name.startswith("python"):
        if required:
            raise UsageError(f"{command[0]} is no Python program: start it under {_INSTRUMENT} in the command itself")
        return []
    wrapper = program.parent / _INSTRUMENT
    if wrapper.exists():
        return [str(wrapper)]
    message = f"{program} has no {_INSTRUMENT} beside it: install agl-otel into its environment, or the agent's own spans are missing"
    if required:
        raise UsageError(message)
    _log.warning("%s", message)
    return []


class _Pipe:
    """The read end of a pipe that feeds a capture. Not asyncio's own: there the end of a process waits for the end of its pipes."""

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
    """`command` with the path of its program. A bare `python` that PATH does not know is the interpreter we run on."""
    program = command[0]
    if "/" in program:
        path = (cwd or Path()).absolute() / program
        found = str(path) if os.access(path, os.X_OK) else None
    else:
        found = shutil.which(program, path=env.get("PATH"))
    if found is None and program in ("python", "python3"):
        found = sys.executable
    if found is None:
        raise UsageError(f"there is no program {program!r} that can be run{'' if '/' in program else ' on the PATH'}")
    return [found, *command[1:]]


def _quoted(lines: str) -> str:
    return f": {lines}" if lines else " and printed nothing"
