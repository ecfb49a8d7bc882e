"""Jobs of the baseline or of a custom algorithm (`file.py:name`), with runner processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.adapters import TracerTraceToTriplet
from agl_otel.algorithms import Algorithm, Baseline, FunctionalAlgorithm
from agl_otel.algorithms.run_folder import RUN_DIR, Fingerprint, run_folder_for
from agl_otel.compat.stores import LightningStore
from agl_otel.errors import SettingsError, UsageError
from agl_otel.jobs.algorithm_table import Need, options_of
from agl_otel.jobs.job import Job
from agl_otel.jobs.run import JobRun, unless_failed
from agl_otel.runner.agents import load_function
from agl_otel.runner.threads import call

GIVEN: Final = (RUN_DIR, "rollout_config")
"""Arguments that the job sets if the algorithm takes them: the run's folder, and [agent]'s time limits."""


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] for the baseline: its name and its keyword arguments."""
    return options_of(name, Baseline, hidden=GIVEN)


def needs(job: Job) -> list[Need]:
    """Return no checks: the baseline needs nothing, and the needs of a custom algorithm are unknown."""
    return []


def fingerprint(job: Job, folder: Path) -> Fingerprint | None:
    """Return None: the algorithm itself opens the run's folder, or its name is known when it is made."""
    return None


def arguments(job: Job, make: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """Return the keyword arguments for `make`, which creates the algorithm. Raises SettingsError if the job's options do not fit it."""
    name, parameters = job.algorithm["name"], inspect.signature(make).parameters
    ours = {RUN_DIR: folder, "rollout_config": job.agent.rollout_config}
    given = {key: value for key, value in ours.items() if key in parameters} | job.options
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise SettingsError(f"[algorithm] the options do not fit {name}: {error}; it takes {', '.join(parameters) or 'none'}") from None
    return given


def named(job: Job, *, val: bool) -> Any:
    """Load the algorithm `name` of the job: Baseline, or a custom one, its class, or a function that returns one.

    Raises SettingsError if it is missing, or does not take the job's options or, with `val`, validation tasks.
    """
    name: str = job.algorithm["name"]
    try:
        found: Any = Baseline if name == "baseline" else load_function(job.located(name))
    except UsageError as error:
        raise SettingsError(f"[algorithm] name: {error}") from error
    if not isinstance(found, Algorithm):
        arguments(job, found, Path())
    elif job.options:
        raise SettingsError(f"[algorithm] {', '.join(job.options)}: {name} is made already and takes no options")
    if val and isinstance(found, FunctionalAlgorithm) and not found.takes("val_dataset"):
        raise SettingsError(f"[data] val: algorithm {name} takes no val_dataset; leave it out")
    return found


class CustomRun(JobRun):
    """A run of the baseline or of a custom algorithm over a store. Use `async with`."""

    _opens_folder = False
    """Whether the algorithm opens the run's folder itself."""

    async def fit(self, train: Sequence[Any], val: Sequence[Any] | None) -> Algorithm:
        """Run the algorithm, with runners, and return it. Raises SettingsError if the job does not fit it, and what it raises."""
        adapter = TracerTraceToTriplet()
        algorithm = self.algorithm(val=val is not None)
        algorithm.set_adapter(adapter)
        if self.job.resources:
            algorithm.set_initial_resources(self.job.resources)
        async with LightningStore(self.store.description.queue, token=self.store.token).labelled(self.store.labels) as store:
            algorithm.set_store(store)
            with run_folder_for(
                algorithm,
                None if self._opens_folder else self.folder,
                train=train,
                val=val,
                resources=self.job.resources,
                options=self.job.options,
                agent=self.job.agent.model_dump(include={"function", "command", "grader"}),
            ):
                async with self.runners():
                    await unless_failed(self.failed, call(algorithm.run, train, val))
        return algorithm

    def algorithm(self, *, val: bool = False) -> Algorithm:
        """Create the job's algorithm. Raises SettingsError if it is not an Algorithm, and what `named` raises."""
        found = named(self.job, val=val)
        if isinstance(found, Algorithm):
            return found
        given = arguments(self.job, found, self.folder)
        self._opens_folder = RUN_DIR in given
        made = found(**given)
        if not isinstance(made, Algorithm):
            name, kind = self.job.algorithm["name"], type(made).__name__
            raise SettingsError(
                f"[algorithm] name = {name!r} gives a {kind}: name an Algorithm, a function that returns one, or one under @algo"
            )
        return made
