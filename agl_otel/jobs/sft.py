"""A run of a job file for supervised fine-tuning: rounds of SFT over the job's agent, with its own model server."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from agl_otel.algorithms.run_folder import Fingerprint, RunFolder
from agl_otel.algorithms.sft.options import SFTOptions
from agl_otel.algorithms.sft.report import RoundReport
from agl_otel.jobs.algorithm_table import Need, check_sinks, check_timeouts, of_table, options_of, steps_warnings, without
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings
from agl_otel.jobs.memory_check import learning_rate_warnings
from agl_otel.jobs.served import ServedRun, fingerprint_of, needs_of_policy, notes_of_policy, policy_made, served_options

if TYPE_CHECKING:
    from agl_otel.algorithms.sft.algorithm import SFT

notes = notes_of_policy
_SET_BY_JOB: Final = frozenset({"model_dir", "model_server_url", "on_step", "validator", "run_dir", "rollout_config"})


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] of an SFT job: its name, and the algorithm's keyword arguments as options."""
    return options_of(name, SFTOptions, hidden=_SET_BY_JOB)


def needs(job: Job) -> list[Need]:
    """Return the checks of what an SFT job needs: packages, consistent options, its policy, and the policy's server."""
    return [
        lambda: import_module("agl_otel.algorithms.sft.algorithm"),
        lambda: check_sinks(job.options.get("metrics")),
        lambda: _check_options(job),
        lambda: check_timeouts(job, job.options.get("step_timeout_seconds", SFTOptions.step_timeout_seconds)),
        lambda: Findings(warnings=steps_warnings(job.options, max_steps=SFTOptions.max_steps)),
        *needs_of_policy(job, lambda facts: Findings(warnings=learning_rate_warnings(job, facts))),
    ]


def _check_options(job: Job) -> None:
    with of_table("algorithm"):
        SFTOptions(model_dir="", model_server_url="", **without(job.options, "metrics"))


def fingerprint(job: Job, folder: Path) -> Fingerprint | None:
    """Return the fingerprint with which the run in `folder` is resumed; None if its policy is yet to be created. Raises what `policy_made`
    raises."""
    model_dir = policy_made(job, folder)
    return fingerprint_of(job, made(job, model_dir, ""), SFTRun.name) if model_dir is not None else None


def made(job: Job, model_dir: Path, server_url: str, **more: Any) -> SFT:
    """Make the job's algorithm over a model and its server; `more` are arguments that a job does not set."""
    from agl_otel.algorithms.sft.algorithm import SFT

    return SFT(
        model_dir=model_dir,
        model_server_url=server_url,
        rollout_config=job.agent.rollout_config,
        **more,
        **served_options(job),
    )


class SFTRun(ServedRun):
    """The processes of one SFT run over a store. Use `async with`; a folder that already holds the run resumes it."""

    name = "sft"

    def algorithm(self, *, run: RunFolder | None = None, on_step: Callable[[RoundReport], object] | None = None) -> SFT:
        """Create the job's algorithm over this run's policy and model server."""
        more: dict[str, Any] = {"run_dir": run, "on_step": on_step, "validator": self.validate}
        return made(self.job, self.model_dir, self.server_url, **more)
