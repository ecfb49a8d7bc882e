"""Supervised fine-tuning as a job file describes it: rounds of SFT over the job's agent, with a model server for as long as they last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.sft.algorithm import SFT
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.jobs.job import Job
from agl_otel.jobs.options import Need, options_of, without
from agl_otel.jobs.run import unless
from agl_otel.jobs.served import ServedRun, needs_of_policy

_SET_BY_JOB: Final = frozenset({"model_dir", "model_server_url", "on_step", "run_dir", "rollout_config"})


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that tunes: its name and its options, which are the algorithm's own keyword arguments."""
    return options_of(name, SFT, hidden=_SET_BY_JOB)


def needs(job: Job) -> list[Need]:
    """What a job that tunes needs: packages, options that go together, its policy, and what serves it."""
    return [
        lambda: check_metrics(job.options.get("metrics")),
        lambda: SFT(model_dir="", model_server_url="", **without(job.options, "metrics")),
        *needs_of_policy(job),
    ]


class Tuning(ServedRun):
    """The processes of one run of SFT over a store. Use `async with`; a folder that holds the run already goes on with it."""

    name = "sft"

    async def fit(self, tasks: Sequence[Any], *, on_step: Callable[[RoundReport], object] | None = None) -> list[RoundReport]:
        """Tune until the algorithm is content; `on_step` gets every round that is done now. Raises what SFT.train raises."""
        self.resources_id = self.run.run_id  # of later evaluations: what the algorithm publishes
        return await unless(self.failed, self.algorithm(run=self.run, on_step=on_step).train(self.store, tasks))

    def algorithm(self, *, run: RunFolder | None = None, on_step: Callable[[RoundReport], object] | None = None) -> SFT:
        """The job's algorithm over this run's policy and model server."""
        return SFT(
            model_dir=self.model_dir,
            model_server_url=self.server_url,
            rollout_config=self.job.agent.rollout_config,
            run_dir=run,
            on_step=on_step,
            **self.options,
        )
