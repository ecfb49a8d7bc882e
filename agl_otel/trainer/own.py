"""A run of any other algorithm as a job file describes it: `baseline`, or one of your own by `file.py:name`, with runner processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.adapters import TracerTraceToTriplet
from agl_otel.algorithms import Algorithm, Baseline, FunctionalAlgorithm
from agl_otel.errors import SettingsError
from agl_otel.runner.agents import load_function
from agl_otel.runner.threads import call
from agl_otel.trainer.job import Job
from agl_otel.trainer.keeping import OWN_FOLDER, keeping
from agl_otel.trainer.options import options_of
from agl_otel.trainer.run import JobRun, unless

GIVEN: Final = (OWN_FOLDER, "rollout_config")
"""What an algorithm gets from the job, where it takes an argument of that name: the run's folder, and [agent]'s time limits."""


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that runs the baseline: its name and its options, which are its own keyword arguments."""
    return options_of(name, Baseline, hidden=GIVEN)


def check(job: Job) -> None:
    """The baseline needs no extra; what an algorithm of the user's own needs is its own business."""


class OwnRun(JobRun):
    """A run of the baseline, or of the user's algorithm, over a store. Use `async with`."""

    _keeps_itself = False

    async def fit(self, train: Sequence[Any], val: Sequence[Any] | None) -> Algorithm:
        """Run it, with runners; the algorithm afterwards. Raises SettingsError where the job does not fit it, and what it raises itself."""
        adapter = TracerTraceToTriplet()
        algorithm = self.algorithm()
        if val is not None and isinstance(algorithm, FunctionalAlgorithm) and not algorithm.takes("val_dataset"):
            raise SettingsError(f"[data] val: algorithm {self.job.algorithm['name']} takes no val_dataset; leave it out")
        algorithm.set_store(self.store)
        algorithm.set_adapter(adapter)
        if self.job.resources:
            algorithm.set_initial_resources(self.job.resources)
        with keeping(
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

    def algorithm(self) -> Algorithm:
        """The job's algorithm, made with its options. Raises SettingsError where it is none, or takes other options."""
        name: str = self.job.algorithm["name"]
        found: Any = Baseline if name == "baseline" else load_function(self.job.located(name))
        if isinstance(found, Algorithm):
            if self.job.options:
                raise SettingsError(f"[algorithm] {', '.join(self.job.options)}: {name} is made already and takes no options")
            return found
        arguments = self._arguments(name, found)
        self._keeps_itself = OWN_FOLDER in arguments
        made = found(**arguments)
        if not isinstance(made, Algorithm):
            kind = type(made).__name__
            raise SettingsError(
                f"[algorithm] name = {name!r} gives a {kind}: name an Algorithm, a function that returns one, or one under @algo"
            )
        return made

    def _arguments(self, name: str, make: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(make).parameters
        ours = {OWN_FOLDER: self.folder, "rollout_config": self.job.agent.rollout_config}
        given = {key: value for key, value in ours.items() if key in parameters} | self.job.options
        try:
            inspect.signature(make).bind(**given)
        except TypeError as error:
            raise SettingsError(f"[algorithm] the options do not fit {name}: {error}; it takes {', '.join(parameters) or 'none'}") from None
        return given
