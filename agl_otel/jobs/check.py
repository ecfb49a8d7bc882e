"""`agl-otel train JOB.toml --check`: reports everything that is wrong with a job at once, without starting anything.

Nothing is written, enqueued or run. But the user's modules are loaded, as in a run, and functions that return tasks are called.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from agl_otel.adapters.gates import LEAST_TASKS
from agl_otel.adapters.traffic import EXAMPLE
from agl_otel.algorithms.checked_files import digest_of
from agl_otel.algorithms.hub import download_note
from agl_otel.algorithms.run_folder import RUN, Sources, check_run
from agl_otel.errors import AglError, SettingsError
from agl_otel.jobs import custom as own
from agl_otel.jobs.improve_options import NO_IMPROVE, SEARCHES, problems_of
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings, Memory
from agl_otel.jobs.sources import sources_of
from agl_otel.runner.agents import CommandAgent, FunctionAgent, load_function
from agl_otel.runner.job import check_grader
from agl_otel.store import Store
from agl_otel.types import RolloutQuery

SEARCHED_ROLLOUTS: Final = 4096  # last rollouts of the store that are searched for the job's tasks
SEARCHED_TRACES: Final = 64  # of those, how many are searched for names of agents


@dataclass
class CheckReport:
    """What was found."""

    problems: list[str] = field(default_factory=list[str])
    """Why the job cannot be run; empty: it can."""
    notes: list[str] = field(default_factory=list[str])
    """What could not be checked, how the policy is served, and what a run downloads."""
    warnings: list[str] = field(default_factory=list[str])
    """What can be run, but probably should not be."""
    memory: Memory | None = None
    """Of a GRPO job whose model could be read."""
    algorithm: str = ""
    train: int = 0
    """Number of tasks."""
    val: int = 0


def missing_extra(error: ModuleNotFoundError) -> SettingsError:
    """Return what to install if training cannot be imported."""
    return SettingsError(f"training needs the [train] extra ({error.name} is missing): pip install 'agl-otel[train]'")


async def check_job(path: Path, *, store: str = "", token: str = "", improves: bool = False) -> CheckReport:
    """Check the job file `path`, everything that it names, and the store at this address, if any; `improves`: and that it has [improve]."""
    found = CheckReport()
    with _collecting(found):
        job, found.problems[:] = Job.read(path)
        if job is not None:
            tasks = _check(job, found)
            if improves and job.improve is None:
                found.problems.append(NO_IMPROVE)
            if not found.problems and (note := download_note(job.policy.model, job.folder)) is not None:
                found.notes.append(note)
            await _check_store(store, token, found, job.options.get("agent_match"), tasks, improves=improves)
    return found


def checked_job(path: Path) -> tuple[Job, list[str]]:
    """Load a job and check it as `check_job` does, without a store; for a run, before it starts anything. Returns it with the warnings.

    Raises SettingsError, which names the file and everything that is wrong with the job.
    """
    job, problems = Job.read(path)
    found = CheckReport(problems)
    if job is not None:
        _check(job, found)
    if job is None or found.problems:
        raise SettingsError(f"job file {path}: {'; '.join(found.problems)}")
    return job, list(dict.fromkeys(found.warnings))


def check_run_folder(job: Job, folder: Path, *, force: bool) -> None:
    """Check that the run in `folder`, if any, can be resumed by this job; before anything is started, and without a store.

    `force`: as in JobRun. Raises UsageError that names all options and code that the run was begun with others of, InUseError, DataError.
    """
    resumes = (folder / RUN).exists()
    check_run(folder, Sources(sources_of(job), force), import_module(job.run_by).fingerprint(job, folder) if resumes else None)


def _check(job: Job, found: CheckReport) -> list[Any]:
    """Check everything that needs no store, and return the tasks."""
    found.algorithm = job.algorithm.get("name", "grpo")
    _check_needs(import_module(job.run_by), job, found)
    train, val = list[Any](), list[Any]()
    scores = job.run_by != own.__name__
    with _collecting(found):
        train = job.tasks("train")
    if (scores or job.data.val) and not job.has_wrong("[data] val"):
        with _collecting(found):
            val = job.tasks("val")
    found.train, found.val = len(train), len(val)
    if job.improve is not None and job.improve.held_out != "off" and 0 < len(val) < LEAST_TASKS:
        found.warnings.append(
            f"[data] val has {len(val)} tasks: of fewer than {LEAST_TASKS}, a gate never says that a score fell or rose by more "
            "than chance; give it twenty or more"
        )
    if not scores:
        with _collecting(found):
            own.named(job, val=job.data.val is not None)
    found.problems += problems_of(job)
    made_of_traffic = [EXAMPLE] if job.improve is not None and found.algorithm in SEARCHES else []
    with contextlib.chdir(job.folder):  # the runners' working directory
        _check_agent(job, [*train, *val, *made_of_traffic], found)
    if job.options.get("learning_rate") == 0:
        found.notes.append("learning_rate = 0 is a control experiment: nothing is learnt")
    return [*train, *val]


def _check_needs(module: ModuleType, job: Job, found: CheckReport) -> None:
    for need in module.needs(job):
        with _collecting(found):
            if isinstance(outcome := need(), Findings):
                found.problems += outcome.problems
                found.warnings += outcome.warnings
                found.notes += outcome.notes
                found.memory = outcome.memory or found.memory
    with _collecting(found):
        found.notes += module.notes(job) if hasattr(module, "notes") else []


def _check_agent(job: Job, tasks: Sequence[Any], found: CheckReport) -> None:
    if job.agent.function is not None:
        with _collecting(found, "[agent] function: "):
            function = FunctionAgent(load_function(job.agent.function))
            for task in tasks:
                function.check(task)
    if job.agent.grader is not None:
        with _collecting(found, "[agent] grader: "):
            check_grader(load_function(job.agent.grader))
    elif job.improve is None:  # else the product's users give rewards
        found.notes.append(
            "[agent] has no grader: rewards must come from the agent (a number that its function returns, or emit_reward); an attempt "
            "without one is not trained on"
        )
    if command := job.agent.command:
        with _collecting(found, "[agent] command: "):
            beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            agent = CommandAgent(command, env={"PATH": beside})
            for task in tasks:
                agent.check(task)
        for argument in command[1:]:
            if argument.endswith(".py") and "{" not in argument and not Path(argument).is_file():
                found.problems.append(f"[agent] command: there is no file {Path(argument).absolute()}")


async def _check_store(
    address: str, token: str, found: CheckReport, agent_match: str | Mapping[str, str] | None, tasks: Sequence[Any], *, improves: bool
) -> None:
    if not address:
        what = ": give --store, of the stack of the product" if improves else ": a run starts a stack of its own"
        found.notes.append(f"no store is named, and none runs on the data directory{what}")
        return
    with _collecting(found, f"the store {address}: "):
        async with await Store.connect(address, token=token) as store:
            for pattern in agent_match.values() if isinstance(agent_match, Mapping) else filter(None, [agent_match]):
                await _check_match(store, found, pattern, tasks)


async def _check_match(store: Store, found: CheckReport, pattern: str, tasks: Sequence[Any]) -> None:
    """Check that `agent_match` matches an agent in the last rollouts of these tasks."""
    known = {digest_of(task) for task in tasks}
    ended = await store.rollouts(RolloutQuery(status_in=["succeeded"], sort_by="start_time", sort_order="desc", limit=SEARCHED_ROLLOUTS))
    of_tasks = [rollout for rollout in ended if digest_of(rollout.input) in known]
    traces = await store.traces(of_tasks[:SEARCHED_TRACES], deadline_seconds=0.0)
    names = sorted(set(traces.calls.agent))
    if not names:
        found.notes.append(f"agent_match = {pattern!r} is held against nothing: the store has no model calls of these tasks yet")
    elif not any(re.search(pattern, name) for name in names):
        known = ", ".join(name or "(one without a name)" for name in names)
        found.problems.append(
            f"[algorithm] agent_match = {pattern!r} matches none of the agents that the store knows of these tasks: {known}"
        )


@contextlib.contextmanager
def _collecting(found: CheckReport, before: str = "") -> Generator[None]:
    """Record an error of the block as a problem, once, and continue."""
    try:
        yield
    except (ModuleNotFoundError, AglError) as error:
        message = str(missing_extra(error)) if isinstance(error, ModuleNotFoundError) else before + str(error)
        if message not in found.problems:
            found.problems.append(message)
