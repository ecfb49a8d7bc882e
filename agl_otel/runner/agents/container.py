"""Container agents: command agents whose command line is docker's or podman's.

The container gets the attempt's variables, not the runner's environment. Their values are passed in the environment of the engine's
client, so that no token appears on a command line. By default it shares the host's network, where the stack's addresses are valid.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.errors import UsageError
from agl_otel.runner.agents.command import CommandAgent, is_instrumented
from agl_otel.runner.job import Job
from agl_otel.runner.starting import AgentProcess
from agl_otel_hook import conventions
from agl_otel_hook.records import CONTAINER_ROOT, folder_of

ENGINES: Final = ("docker", "podman")
_FILES: Final = (conventions.ENV_TASK_FILE, conventions.ENV_RESOURCES_FILE)


class ContainerAgent(CommandAgent):
    """Runs `image` for each attempt with `command` as its arguments; its stdout is the answer.

    Args:
        image: the container image.
        command: arguments; `{name}` is filled from the task.
        engine: docker or podman; None: the first that is installed.
        mounts: {host folder: folder in the container}, read-only.
        network: the engine's network; one other than "host" must reach the stack's addresses.
        **options: those of CommandAgent except `instrument`, `warm` and `preload`. `env` is added to the attempt's variables; `hooked`
            defaults to whether `command` begins with opentelemetry-instrument.

    Raises UsageError where no engine is installed.
    """

    def __init__(
        self,
        image: str,
        command: Sequence[str] = (),
        *,
        engine: str | None = None,
        mounts: Mapping[str | Path, str] | None = None,
        network: str = "host",
        **options: Any,
    ) -> None:
        found = engine or next((name for name in ENGINES if shutil.which(name)), None)
        if found is None:
            raise UsageError(f"no container engine is installed: install {' or '.join(ENGINES)}, or run the agent as a command")
        self._image, self._network = image, network
        self._mounts = {str(Path(source).absolute()): target for source, target in (mounts or {}).items()}
        if options.get("hooked") is None:
            options["hooked"] = is_instrumented(command)
        super().__init__([found, *command], instrument=False, **options)
        self._base = dict(options.get("env") or {})

    def launch(self, argv: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the engine's command line and environment."""
        engine, *arguments = argv
        mounts = {**self._mounts, **{env[name]: env[name] for name in _FILES if name in env}}
        memory = self._limits.memory_bytes
        writable: dict[str, str] = {}
        if root := env.get(conventions.ENV_LEDGER):  # the container sees the ledger of its attempt only
            folder = folder_of(root, env[conventions.ENV_ROLLOUT_ID], env[conventions.ENV_ATTEMPT_ID])
            writable[str(folder)] = f"{CONTAINER_ROOT}/{folder.name}"
            env = {**env, conventions.ENV_LEDGER: CONTAINER_ROOT}
        return [
            *(engine, "run", "--rm", "--init", "--name", container_name(env[conventions.ENV_ATTEMPT_ID]), "--network", self._network),
            *(["--memory", str(memory)] if memory is not None else []),
            *(part for name in sorted(env) for part in ("--env", name)),
            *(part for source, target in sorted(mounts.items()) for part in ("--volume", f"{source}:{target}:ro")),
            *(part for source, target in writable.items() for part in ("--volume", f"{source}:{target}")),
            *(self._image, *arguments),
        ], {**os.environ, **env}  # fmt: skip

    async def _end(self, process: AgentProcess, job: Job) -> None:
        await super()._end(process, job)
        remover = await asyncio.create_subprocess_exec(
            self._command[0], "rm", "--force", container_name(job.attempt_id),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await remover.wait()  # needed because a container outlives the engine's client when that is killed


def container_name(attempt_id: str) -> str:
    """Return the name of an attempt's container."""
    return f"agl-{attempt_id.replace(':', '-')}"
