"""Shared by the tests of examples/: one stack, scripted models, and runs of an example's own job file with them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from agl_otel.adapters import to_transitions
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import Store
from agl_otel.types import LLM, AttemptedRollout, NamedResources, Rollout
from agl_otel.types.columns import Traces
from tests.matrix.environments import PLACE, CannotInstallError, environment
from tests.matrix.frameworks import BY_NAME
from tests.matrix.model import ScriptedModel

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
PORTS: Final = ("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port")
WAIT_SECONDS: Final = 600.0  # for a machine under load
_FOREIGN: Final = ("OTEL_", "OPENAI_", "ANTHROPIC_", "AGL_", "VIRTUAL_ENV", "PYTHON")


def python_of(name: str) -> str:
    """Return the interpreter of a framework's environment (tests/matrix), which is created if missing; skip the test if it cannot be.

    The example must require no other versions than that environment has.
    """
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{name}.lock").open("w") as lock:  # test files run in parallel
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return environment(BY_NAME[name]).command[0]
        except CannotInstallError as error:
            pytest.skip(f"the environment of {name} cannot be installed: {error}")


def asks_for(example: str, name: str) -> bool:
    """Return whether an example's requirements are a subset of the framework environment's."""
    pinned = (BY_NAME[name].folder / "requirements.txt").read_text().splitlines()
    return set((EXAMPLES / example / "requirements.txt").read_text().splitlines()) <= set(pinned)


def free_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that influence an agent."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | more


@dataclass
class Stage:
    """A running stack."""

    store: Store

    @property
    def address(self) -> str:
        """Argument of `--store`."""
        return str(self.store.description.queue)

    async def play(
        self, folder: Path, command: Sequence[str], tasks: Sequence[Any], model: ScriptedModel, *, grader: str = "", **more: Any
    ) -> Traces:
        """Run a command agent once for each task, with its own runner in the agent's folder; return the traces."""
        return await self.run(folder, tasks, {"main_llm": _llm(model)}, grader=grader, agent=("--", *command), **more)

    async def run(
        self,
        folder: Path,
        tasks: Sequence[Any],
        resources: NamedResources,
        *,
        agent: Sequence[str],
        grader: str = "",
        env: dict[str, str] | None = None,
    ) -> Traces:
        """Run any agent with any resources, like `play`."""
        published = await self.store.publish(resources)
        rollouts = await self.store.enqueue(list(tasks), resources_id=published.resources_id)
        ids = [rollout.rollout_id for rollout in rollouts]
        graded = ("--grader", grader) if grader else ()
        async with self.runner(folder, *graded, *agent, env=env):
            ended = await self.store.wait(ids, timeout_seconds=WAIT_SECONDS)
            assert len(ended) == len(ids), "the runner ended before its rollouts"
        return await self.store.traces(ids, deadline_seconds=30.0)

    @asynccontextmanager
    async def runner(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> AsyncGenerator[None]:
        """Run a runner in an agent's folder, two rollouts at a time, for the block."""
        options = ("--concurrency", "4", "--timeout", str(WAIT_SECONDS))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agl_otel.runner", *options, *arguments),
            env=free_environment(AGL_STORE=self.address, **(env or {})),
            cwd=folder,
        )
        try:
            yield
        finally:
            await _end(process)


def _llm(model: ScriptedModel) -> LLM:
    return LLM(endpoint=model.url, model="scripted", api_key="sk-secret")


async def finished(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program to its end; return its output. Fails if its exit code is not 0."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=free_environment(**(env or {})),
        cwd=cwd,
    )
    try:
        output = (await asyncio.wait_for(process.communicate(), WAIT_SECONDS))[0].decode()
    finally:
        await _end(process)
    assert process.returncode == 0, output
    return output


@asynccontextmanager
async def serving(*command: str | Path, at: int | None = None) -> AsyncGenerator[str]:
    """Run a server for the block; yield the first line that it prints, or nothing once it listens on port `at`."""
    output = asyncio.subprocess.PIPE if at is None else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=output, env=free_environment())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            if process.stdout is not None:
                line = (await process.stdout.readline()).decode().strip()
            else:
                line = ""
                while at is not None and not await _listens(at):
                    assert process.returncode is None, f"{command} ended with {process.returncode}"
                    await asyncio.sleep(0.1)
        yield line
    finally:
        await _end(process)


@asynccontextmanager
async def started(*command: str | Path, cwd: Path | None = None) -> AsyncGenerator[None]:
    """Run a program for the block."""
    process = await asyncio.create_subprocess_exec(*map(str, command), env=free_environment(), cwd=cwd)
    try:
        yield
    finally:
        await _end(process)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate a process; kill it if it does not end."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def stage(data_dir: Path) -> AsyncGenerator[Stage]:
    """A stack on free ports, without runners."""
    settings = Settings.load(data_dir=data_dir, **dict.fromkeys(PORTS, 0))
    async with Stack(settings, only=("queue", "collector", "proxy")) as stack, await Store.connect(stack.address) as store:
        yield Stage(store)


def rewards(traces: Traces) -> dict[str, float]:
    """Return {rollout id: its last primary reward}, in the order of the rollouts."""
    found = {rollout_id: given[-1].value for (rollout_id, _), given in traces.rewards.items() if given}
    return {rollout.rollout_id: found[rollout.rollout_id] for rollout in traces.rollouts if rollout.rollout_id in found}


def error_of(rollout: Rollout) -> str:
    """Return why a rollout failed."""
    return (rollout.attempt.error or "") if isinstance(rollout, AttemptedRollout) else rollout.status


def assert_whole(traces: Traces, model: ScriptedModel, *, calls: int | None = None) -> None:
    """Check that every rollout succeeded and is complete, and that every call of the model is in the traces, token for token as sampled.

    Args:
        traces: of all rollouts that used the model.
        model: the model that they used.
        calls: required number of its calls; None: any number but 0.
    """
    assert [(rollout.status, error_of(rollout)) for rollout in traces.rollouts] == [("succeeded", "")] * len(traces.rollouts)
    kinds = [(verdict.kind, verdict.reasons) for verdict in traces.verdicts.values()]
    assert kinds == [("complete", [])] * len(traces.rollouts), kinds
    assert len(model.served) == (len(traces.calls) if calls is None else calls) > 0
    samples = to_transitions(traces)
    assert len(samples) == len(model.served), dict(samples.refused)
    sampled = {answer.span_id: answer.sampled for answer in model.served}
    for place in range(len(samples)):
        [row] = samples.rows[place].tolist()
        wanted = sampled[traces.calls.span_id[row]]
        assert samples.prompt[place].tolist() == wanted.prompt_ids
        assert samples.response[place].tolist() == wanted.response_ids
        assert np.array_equal(samples.logprobs[place], np.array(wanted.logprobs, np.float32))
