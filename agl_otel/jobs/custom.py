"""A run of any other algorithm as a job file describes it: `baseline`, or one of your own by `file.py:name`, with runner processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.adapters import TracerTraceToTriplet
from agl_otel.algorithms import Algorithm, Baseline, FunctionalAlgorithm
from agl_otel.algorithms.kept_runs import RUN_DIR, run_folder_for
from agl_otel.errors import SettingsError
from agl_otel.jobs.job import Job
from agl_otel.jobs.options import Need, options_of
from agl_otel.jobs.run import JobRun, unless
from agl_otel.runner.agents import load_function
from agl_otel.runner.threads import call

GIVEN: Final = (RUN_DIR, "rollout_config")
"""What an algorithm gets from the job, where it takes an argument of that name: the run's folder, and [agent]'s time limits."""


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that runs the baseline: its name and its options, which are its own keyword arguments."""
    return options_of(name, Baseline, hidden=GIVEN)


def needs(job: Job) -> list[Need]:
    """None: the baseline needs no extra, and what an algorithm of the user's own needs is its own business."""
    return []


def arguments(job: Job, make: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """What the job's algorithm is made with, by `make`. Raises SettingsError where its options do not fit."""
    name, parameters = job.algorithm["name"], inspect.signature(make).parameters
    ours = {RUN_DIR: folder, "rollout_config": job.agent.rollout_config}
    given = {key: value for key, value in ours.items() if key in parameters} | job.options
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise SettingsError(f"[algorithm] the options do not fit {name}: {error}; it takes {', '.join(parameters) or 'none'}") from None
    return given


def named(job: Job, *, val: bool) -> Any:
    """What the job's `name` names: Baseline, or something of the user's own.

    Raises UsageError where it is not there, or takes other options or no validation tasks (`val`: whether there are some).
    """
    name: str = job.algorithm["name"]
    found: Any = Baseline if name == "baseline" else load_function(job.located(name))
    if not isinstance(found, Algorithm):
        arguments(job, found, Path())
    elif job.options:
        raise SettingsError(f"[algorithm] {', '.join(job.options)}: {name} is made already and takes no options")
    if val and isinstance(found, FunctionalAlgorithm) and not found.takes("val_dataset"):
        raise SettingsError(f"[data] val: algorithm {name} takes no val_dataset; leave it out")
    return found


class OwnRun(JobRun):
    """A run of the baseline, or of the user's algorithm, over a store. Use `async with`."""

    _keeps_itself = False

    async def fit(self, train: Sequence[Any], val: Sequence[Any] | None) -> Algorithm:
        """Run it, with runners; the algorithm afterwards. Raises SettingsError where the job does not fit it, and what it raises itself."""
        adapter = TracerTraceToTriplet()
        algorithm = self.algorithm(val=val is not None)
        algorithm.set_store(self.store)
        algorithm.set_adapter(adapter)
        if self.job.resources:
            algorithm.set_initial_resources(self.job.resources)
        with run_folder_for(
            algorithm,
            None if self._keeps_itself else self.folder,
            train=train,
            val=val,
            resources=self.job.resources,
            options={**self.job.options, "agent": self.job.agent.model_dump(include={"function", "command", "grader"})},
        ):
            async with self.runners():
                await unless(self.failed, call(algorithm.run, train, val))
        return algorithm

    def algorithm(self, *, val: bool = False) -> Algorithm:
        """The job's algorithm, made with its options. Raises SettingsError where it is none, or does not fit the job (`named`)."""
        found = named(self.job, val=val)
        if isinstance(found, Algorithm):
            return found
        given = arguments(self.job, found, self.folder)
        self._keeps_itself = RUN_DIR in given
        made = found(**given)
        if not isinstance(made, Algorithm):
            name, kind = self.job.algorithm["name"], type(made).__name__
            raise SettingsError(
                f"[algorithm] name = {name!r} gives a {kind}: name an Algorithm, a function that returns one, or one under @algo"
            )
        return made
