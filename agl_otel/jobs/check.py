"""`agl-otel train JOB.toml --check`: all that is wrong with a job, told at once, before anything is started.

Nothing is written, enqueued or run. The user's own modules are loaded, as a run would, and the functions that give tasks are called.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.run_folder import digest_of
from agl_otel.errors import AglError, SettingsError
from agl_otel.jobs import custom as own
from agl_otel.jobs.job import Job
from agl_otel.runner.agents import CommandAgent, load_function
from agl_otel.store import Store
from agl_otel.types import RolloutQuery

LOOKED_THROUGH: Final = 4096  # of the store's last rollouts: which are of the job's tasks
LOOKED_AT: Final = 64  # of those: what their agents are called


@dataclass
class Checked:
    """What was found."""

    problems: list[str] = field(default_factory=list[str])
    """Why the job cannot be run; none: it can."""
    notes: list[str] = field(default_factory=list[str])
    """What could not be looked at."""
    algorithm: str = ""
    train: int = 0
    """Tasks."""
    val: int = 0


def missing_extra(error: ModuleNotFoundError) -> SettingsError:
    """What to install where training cannot be loaded."""
    return SettingsError(f"training needs the [train] extra ({error.name} is missing): pip install 'agl-otel[train]'")


async def check_job(path: Path, *, store: str = "", token: str = "") -> Checked:
    """Look at the job file `path`, at all that it names, and at the store of this address, where there is one."""
    found = Checked()
    with _told(found):
        job, found.problems[:] = Job.read(path)
        if job is not None:
            await _check(job, store, token, found)
    return found


async def _check(job: Job, store: str, token: str, found: Checked) -> None:
    found.algorithm = job.algorithm.get("name", "grpo")
    for need in import_module(job.run_by).needs(job):
        with _told(found):
            need()
    with contextlib.chdir(job.folder):  # where runners work
        train, val = list[Any](), list[Any]()
        scores = job.run_by != own.__name__
        with _told(found):
            train = job.tasks("train")
        if scores or job.data.val:
            with _told(found):
                val = job.tasks("val")
        found.train, found.val = len(train), len(val)
        if not scores:
            with _told(found):
                own.named(job, val=job.data.val is not None)
        _check_agent(job, [*train, *val], found)
    pattern = _agent_match(job, found)
    await _check_store(store, token, found, pattern, [*train, *val])


def _check_agent(job: Job, tasks: Sequence[Any], found: Checked) -> None:
    for reference in (job.agent.function, job.agent.grader):
        if reference is not None:
            with _told(found, "[agent] "):
                load_function(reference)
    if command := job.agent.command:
        with _told(found, "[agent] command: "):
            beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            agent = CommandAgent(command, env={"PATH": beside})
            for argument in command[1:]:
                if argument.endswith(".py") and "{" not in argument and not Path(argument).exists():
                    raise SettingsError(f"there is no file {Path(argument).absolute()}")
            for task in tasks:
                agent.check(task)


def _agent_match(job: Job, found: Checked) -> str | None:
    """The job's `agent_match`, where it has one that is a regular expression."""
    pattern: str | None = job.options.get("agent_match")
    try:
        re.compile(pattern or "")
    except re.error as error:
        found.problems.append(f"[algorithm] agent_match = {pattern!r} is no regular expression: {error}")
        return None
    return pattern


async def _check_store(address: str, token: str, found: Checked, pattern: str | None, tasks: Sequence[Any]) -> None:
    if not address:
        found.notes.append("no store is named, and none runs on the data directory: a run starts a stack of its own")
        return
    with _told(found, f"the store {address}: "):
        async with await Store.connect(address, token=token) as store:
            if pattern is not None:
                await _check_match(store, found, pattern, tasks)


async def _check_match(store: Store, found: Checked, pattern: str, tasks: Sequence[Any]) -> None:
    """Hold `agent_match` against the agents that the last rollouts of these tasks had."""
    known = {digest_of(task) for task in tasks}
    ended = await store.rollouts(RolloutQuery(status_in=["succeeded"], sort_by="start_time", sort_order="desc", limit=LOOKED_THROUGH))
    of_tasks = [rollout for rollout in ended if digest_of(rollout.input) in known]
    traces = await store.traces(of_tasks[:LOOKED_AT], deadline_seconds=0.0)
    names = sorted(set(traces.calls.agent))
    if not names:
        found.notes.append(f"agent_match = {pattern!r} is held against nothing: the store has no model calls of these tasks yet")
    elif not any(re.search(pattern, name) for name in names):
        told = ", ".join(name or "(one without a name)" for name in names)
        found.problems.append(
            f"[algorithm] agent_match = {pattern!r} matches none of the agents that the store knows of these tasks: {told}"
        )


@contextlib.contextmanager
def _told(found: Checked, before: str = "") -> Generator[None]:
    """An error of the block is a problem, told once, and not the end."""
    try:
        yield
    except (ModuleNotFoundError, AglError) as error:
        told = str(missing_extra(error)) if isinstance(error, ModuleNotFoundError) else before + str(error)
        if told not in found.problems:
            found.problems.append(told)
