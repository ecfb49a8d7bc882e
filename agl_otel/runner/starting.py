"""Start the process of an attempt, either afresh or as a fork of a warm parent (zygote/).

Programs that cannot be forked are started afresh, and the reason is logged once. No Python code runs between fork and exec here,
because the runner has threads (gRPC, OpenTelemetry).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from agl_otel.errors import AgentError
from agl_otel.net.auth import is_ours
from agl_otel.runner.environment import DUMMY_API_KEY, MODEL_KEYS
from agl_otel.runner.injection import without_hook
from agl_otel.runner.zygote import program as programs
from agl_otel.runner.zygote.client import ForkedProcess, UnfitError, Zygote
from agl_otel.service.private import original_umask
from agl_otel.service.processes import spawn
from agl_otel_hook import conventions

_MAX_PARENT_STARTS: Final = 3  # after that many, warm parents are given up
_ATTEMPT_VARIABLES: Final = (
    *(conventions.ENV_ROLLOUT_ID, conventions.ENV_ATTEMPT_ID, "TRACEPARENT", "BAGGAGE", "OTEL_RESOURCE_ATTRIBUTES"),
    *(
        conventions.ENV_TASK,
        conventions.ENV_TASK_FILE,
        conventions.ENV_RESOURCES,
        conventions.ENV_RESOURCES_FILE,
        "OTEL_EXPORTER_OTLP_HEADERS",
    ),
)
_log = logging.getLogger(__name__)


class AgentProcess(Protocol):
    """The process that leads an attempt's process group."""

    @property
    def pid(self) -> int:
        """The process id, which is also the group's id."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended; return the exit status, negative for a signal."""
        ...


class Starter(Protocol):
    """Starts agents' processes."""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Start a process. Raises OSError or ValueError where the system refuses."""
        ...

    def release(self, process: AgentProcess) -> None:
        """Release a process whose group has ended."""
        ...

    async def close(self) -> None:
        """End helper processes."""
        ...


class FreshStarter:
    """Starts a new process for each attempt. The kernel sends it SIGTERM when this process dies."""

    def __init__(self, wrapper: Sequence[str] = ()) -> None:
        self._wrapper = list(wrapper)

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Start a process, in a process group of its own."""
        return await spawn([*self._wrapper, *argv], stdout=stdout, stderr=stderr, env=env, cwd=cwd, umask=original_umask())

    def release(self, process: AgentProcess) -> None:
        """Do nothing: asyncio has reaped the process."""

    async def close(self) -> None:
        """Do nothing: there are no helper processes."""


class WarmStarter:
    """Forks each process from a warm parent, which is started with the first attempt; `fresh` starts programs that cannot be forked.

    `preload` names modules that the warm parent imports in addition to the program's top-level imports.
    """

    def __init__(self, fresh: FreshStarter, preload: Sequence[str] = ()) -> None:
        self._fresh, self._preload = fresh, list(preload)
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._starts = 0
        self._unfit: str | None = None
        self.forks = 0
        """Number of attempts that were forked."""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Fork a process from the warm parent, or start it afresh."""
        folder = (cwd or Path()).absolute()
        program = programs.parse(argv[1:])
        if isinstance(program, str):
            self._give_up(program)
        elif self._unfit is None:
            try:
                zygote = await self._warm_parent(argv[0], env, folder, program)
                forked = await zygote.fork(program, env, folder, stdout, stderr)
            except UnfitError as error:
                self._give_up(str(error), again=self._zygote is not None and not self._zygote.alive)
            else:
                self.forks += 1
                return forked
        return await self._fresh.start(argv, env, cwd, stdout, stderr)

    def release(self, process: AgentProcess) -> None:
        """Let the warm parent reap it."""
        if isinstance(process, ForkedProcess):
            process.release()

    async def close(self) -> None:
        """End the warm parent."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    async def _warm_parent(self, python: str, env: Mapping[str, str], folder: Path, program: programs.Program) -> Zygote:
        async with self._starting:
            if self._unfit is not None:
                raise UnfitError(self._unfit)
            if self._zygote is None or not self._zygote.alive:
                await self.close()
                self._starts += 1
                source = programs.source_of(program, folder)
                learn_all = not programs.touches_environment(source)
                shared = {name: value for name, value in env.items() if name not in _ATTEMPT_VARIABLES}
                # clients that are built at import time require a key
                shared |= {name: DUMMY_API_KEY for name in MODEL_KEYS if is_ours(shared.get(name, ""))}
                shared = without_hook(shared)  # its forks load it
                self._zygote = await Zygote.start(
                    python, shared, imports=programs.imports_at_the_top(source), preload=self._preload, learn_all=learn_all, cwd=folder
                )
                _log.info("agents are forked from a warm parent, process %d", self._zygote.pid)
            return self._zygote

    def _give_up(self, reason: str, *, again: bool = False) -> None:
        if again and self._starts < _MAX_PARENT_STARTS:
            _log.warning("%s; this attempt is started afresh, the next one gets a new warm parent", reason)
        elif self._unfit is None:
            self._unfit = reason
            _log.warning("agents are started afresh each time, which is slower: %s", reason)


def start_error(error: Exception, env: Mapping[str, str]) -> AgentError:
    """Make the error for a process that the system did not start."""
    name, value = max(env.items(), key=lambda item: len(item[1]))
    hint = f" (The longest variable is {name} with {len(value)} characters; Linux takes about 131,000.)" if len(value) > 100_000 else ""
    return AgentError(f"the command could not be started: {error}.{hint}")
