"""How the process of an attempt is started: anew, or as a fork of a warm parent (zygote/).

A program that cannot be forked is started anew, and the log says once why. Nothing of ours runs between fork and exec here: this
process has threads (gRPC, OpenTelemetry).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from agl_otel.errors import AgentError
from agl_otel.net.auth import is_ours
from agl_otel.runner.environment import DUMMY_API_KEY
from agl_otel.runner.zygote import program as programs
from agl_otel.runner.zygote.client import Forked, UnfitError, Zygote
from agl_otel.service.private import given_umask
from agl_otel.service.processes import spawn
from agl_otel_hook import conventions

_FEW_STARTS: Final = 3  # so many warm parents may die before every attempt is started anew
_ATTEMPTS_OWN: Final = (
    *(conventions.ENV_ROLLOUT_ID, conventions.ENV_ATTEMPT_ID, "TRACEPARENT", "BAGGAGE", "OTEL_RESOURCE_ATTRIBUTES"),
    *(
        conventions.ENV_TASK,
        conventions.ENV_TASK_FILE,
        conventions.ENV_RESOURCES,
        conventions.ENV_RESOURCES_FILE,
        "OTEL_EXPORTER_OTLP_HEADERS",
    ),
)
_MODEL_KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""A warm parent has some: clients that are built where a module is imported ask for one."""
_log = logging.getLogger(__name__)


class AgentProcess(Protocol):
    """The process that leads an attempt's process group."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended; its exit status, negative for a signal."""
        ...


class Starter(Protocol):
    """Starts agents' processes."""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Start one. Raises OSError or ValueError where the system refuses."""
        ...

    def release(self, process: AgentProcess) -> None:
        """Its group is ended."""
        ...

    async def close(self) -> None:
        """End what it keeps."""
        ...


class Anew:
    """A fresh process for each attempt, which gets SIGTERM from the kernel when this one dies."""

    def __init__(self, wrapper: Sequence[str] = ()) -> None:
        self._wrapper = list(wrapper)

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Start it."""
        return await spawn([*self._wrapper, *argv], stdout=stdout, stderr=stderr, env=env, cwd=cwd, umask=given_umask())

    def release(self, process: AgentProcess) -> None:
        """Nothing: asyncio has reaped it."""

    async def close(self) -> None:
        """Nothing is kept."""


class Warm:
    """Forks of one warm parent, which is started with the first attempt; `anew` for what cannot be forked.

    `preload` names modules to load ahead, beside those that the program imports at its top.
    """

    def __init__(self, anew: Anew, preload: Sequence[str] = ()) -> None:
        self._anew, self._preload = anew, list(preload)
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._starts = 0
        self._unfit: str | None = None
        self.forks = 0
        """How many attempts were forks."""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdout: int, stderr: int) -> AgentProcess:
        """Fork it, or start it anew."""
        folder = (cwd or Path()).absolute()
        found = programs.parse(argv[1:])
        if isinstance(found, str):
            self._give_up(found)
        elif self._unfit is None:
            try:
                zygote = await self._warm_parent(argv[0], env, folder, found)
                forked = await zygote.fork(found, env, folder, stdout, stderr)
            except UnfitError as error:
                self._give_up(str(error), again=self._zygote is not None and not self._zygote.alive)
            else:
                self.forks += 1
                return forked
        return await self._anew.start(argv, env, cwd, stdout, stderr)

    def release(self, process: AgentProcess) -> None:
        """Let the warm parent reap it."""
        if isinstance(process, Forked):
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
                general = {name: value for name, value in env.items() if name not in _ATTEMPTS_OWN}
                general |= {name: DUMMY_API_KEY for name in _MODEL_KEYS if is_ours(general.get(name, ""))}
                self._zygote = await Zygote.start(
                    python, general, imports=programs.imports_at_the_top(source), preload=self._preload, learn_all=learn_all, cwd=folder
                )
                _log.info("agents are forks of a warm parent, process %d", self._zygote.pid)
            return self._zygote

    def _give_up(self, why: str, *, again: bool = False) -> None:
        if again and self._starts < _FEW_STARTS:
            _log.warning("%s; this attempt is started anew, the next gets another warm parent", why)
        elif self._unfit is None:
            self._unfit = why
            _log.warning("agents are started anew each time, which is slower: %s", why)


def refused(error: Exception, env: Mapping[str, str]) -> AgentError:
    """Why the system did not start a process, in words."""
    name, value = max(env.items(), key=lambda item: len(item[1]))
    hint = f" (The longest variable is {name} with {len(value)} characters; Linux takes about 131,000.)" if len(value) > 100_000 else ""
    return AgentError(f"the command could not be started: {error}.{hint}")
