"""An agent that is a command: any program in any language, started once for each attempt.

It has a process group of its own, so that ending it ends what it started, and a kernel's promise (PDEATHSIG, by util-linux's setpriv)
that it gets SIGTERM when the runner is killed. Nothing runs between fork and exec: this process has threads (gRPC, OpenTelemetry).
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
from agl_otel.runner.groups import end_group, register
from agl_otel.runner.job import Grader, Job, grade
from agl_otel.runner.output import KEEP_BYTES, Capture

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
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        if not command:
            raise UsageError("no command was given: write it after `--`, for example `-- python agent.py {question}`")
        self._base = {**os.environ, **(env or {})}
        self._cwd = Path(cwd) if cwd is not None else None
        self._command = _resolved(list(command), self._base, self._cwd)
        if instrument is not False:
            self._command = instrumented(self._command, required=instrument is True)
        self._grader = grader
        self._grace_seconds = grace_seconds
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []

    def prepare(self, addresses: Addresses) -> None:
        """Nothing: each process gets an environment of its own."""

    def check(self, task: Any) -> None:
        """Raise UsageError where the task lacks what the command asks for."""
        placeholders.check(self._command, task)

    async def run(self, job: Job) -> None:
        """Run the command; grade its answer. Raises AgentError with the exit code and the last lines of stderr where it failed."""
        argv = [*self._prefix, *placeholders.fill(self._command, job.rollout.input)]
        env = process_environment(self._base, job.rollout, job.resources, job.addresses, traceparent=job.traceparent, token=job.token)
        stdout, stderr = Capture("stdout"), Capture("stderr")
        job.captures += [stdout, stderr]
        code = await self._execute(argv, env, stdout, stderr)
        if code != 0:
            raise AgentError(f"{self._named(code)}{_quoted(stderr.last_lines() or stdout.last_lines())}")
        if self._grader is None:
            return
        if stdout.cut_bytes:
            raise AgentError(f"the agent printed {stdout.total_bytes} bytes: more than {KEEP_BYTES} are no answer to be graded")
        await grade(job, self._grader, stdout.text().strip())

    async def _execute(self, argv: list[str], env: dict[str, str], stdout: Capture, stderr: Capture) -> int:
        """Run it to its end and give its exit status; when this is cancelled, end its group first."""
        async with contextlib.AsyncExitStack() as stack:
            pipes = [await _Pipe.open(capture, stack) for capture in (stdout, stderr)]
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipes[0].write_end, stderr=pipes[1].write_end,
                    env=env, cwd=self._cwd, start_new_session=True,
                )  # fmt: skip
            except (OSError, ValueError) as error:  # too long an environment, a NUL in an argument, no such folder
                raise AgentError(f"the command could not be started: {error}. {_size_hint(env)}") from error
            finally:
                for pipe in pipes:
                    pipe.close_write_end()
            register(process.pid)
            try:
                code = await process.wait()
            finally:
                await asyncio.shield(end_group(process, self._grace_seconds))
                with contextlib.suppress(TimeoutError):  # somebody who left the group holds the pipe
                    async with asyncio.timeout(DRAIN_SECONDS):
                        await asyncio.gather(*(pipe.closed.wait() for pipe in pipes))
            return code

    def _named(self, code: int) -> str:
        program = Path(self._command[0]).name
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{program} was ended by {signal.Signals(-code).name}"
        return f"{program} ended with exit code {code}"


def instrumented(command: list[str], *, required: bool = False) -> list[str]:
    """`command` under opentelemetry-instrument, if it is a Python program that is not yet.

    The one beside its interpreter is taken: another would bring the packages of another environment. Where there is none, or the
    command is no Python program, the command stays as it is (with a warning, or UsageError where `required`).
    """
    program = Path(command[0])
    if program.name == _INSTRUMENT:
        return command
    if not program.name.startswith("python"):
        if required:
            raise UsageError(f"{command[0]} is no Python program: start it under {_INSTRUMENT} in the command itself")
        return command
    wrapper = program.parent / _INSTRUMENT
    if wrapper.exists():
        return [str(wrapper), *command]
    message = f"{program} has no {_INSTRUMENT} beside it: install agl-otel into its environment, or the agent's own spans are missing"
    if required:
        raise UsageError(message)
    _log.warning("%s", message)
    return command


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


def _size_hint(env: Mapping[str, str]) -> str:
    name, value = max(env.items(), key=lambda item: len(item[1]))
    return f"(The longest variable is {name} with {len(value)} characters; Linux takes about 131,000.)" if len(value) > 100_000 else ""
