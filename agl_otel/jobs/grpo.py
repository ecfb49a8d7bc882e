"""A run of a job file that trains weights by GRPO, with its own model server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from agl_otel.algorithms.grpo.options import OPTION_GROUPS, GRPOOptions, Rollouts, Schedule, Updates, require_lora
from agl_otel.algorithms.grpo.report import StepReport
from agl_otel.algorithms.grpo.vllm_options import samples_otherwise
from agl_otel.algorithms.run_folder import Fingerprint, RunFolder
from agl_otel.jobs.algorithm_table import Need, check_sinks, check_timeouts, of_table, options_of, steps_warnings, without
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings
from agl_otel.jobs.memory_check import look_at
from agl_otel.jobs.policy_server import adapter_rank
from agl_otel.jobs.served import ServedRun, fingerprint_of, needs_of_policy, notes_of_policy, policy_made, served_options
from agl_otel.service.loading import load_function

if TYPE_CHECKING:
    from agl_otel.algorithms.grpo.algorithm import GRPO

notes = notes_of_policy
_SET_BY_JOB: Final = frozenset(
    {
        *("model_dir", "model_server_url", "weights_dir", "run_dir", "on_step", "validator", "rollout_config", "credit_function"),
        *OPTION_GROUPS,
    }
)


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] of a GRPO job: its name, and the options of GRPO and its groups, flat."""
    return options_of(name, GRPOOptions, *OPTION_GROUPS.values(), hidden=_SET_BY_JOB)


def needs(job: Job) -> list[Need]:
    """Return the checks of what a GRPO job needs: packages, consistent options, its policy, and the policy's server."""
    return [
        lambda: import_module("agl_otel.algorithms.grpo.algorithm"),
        lambda: check_sinks(job.options.get("metrics")),
        lambda: require_lora() if job.options.get("lora_rank") is not None else None,
        lambda: _check_options(job),
        lambda: _credit_function(job),
        lambda: check_timeouts(job, job.options.get("step_timeout_seconds", Rollouts.step_timeout_seconds)),
        lambda: Findings(warnings=samples_otherwise(job.policy.vllm_options)),
        lambda: Findings(warnings=_rollouts_warnings(job.options)),
        lambda: Findings(warnings=steps_warnings(job.options, max_steps=Schedule.max_steps, score_window=Schedule.score_window)),
        *needs_of_policy(job, lambda facts: look_at(job, facts)),
    ]


def _rollouts_warnings(options: Mapping[str, Any]) -> list[str]:
    """Return a warning for each option that does not fit the number of a step's rollouts."""
    if offline := next((name for name in ("offline_mode", "selection") if options.get(name) is not None), None):
        unused = [name for name in ("prompts_per_step", "group_size", "step_timeout_seconds") if name in options]
        return [f'{", ".join(unused)} without effect: {offline} = "{options[offline]}" takes the rollouts that there are'] if unused else []
    found: list[str] = []
    prompts, staleness = options.get("prompts_per_step", Rollouts.prompts_per_step), options.get("max_staleness", Rollouts.max_staleness)
    if (groups := options.get("groups_in_flight") or 0) > (most := prompts * (staleness + 1)):
        found.append(
            f"groups_in_flight = {groups} is more than prompts_per_step * (max_staleness + 1) = {most}: some steps take more than "
            "prompts_per_step groups, because those that are max_staleness steps old are waited for"
        )
    rollouts = prompts * options.get("group_size", Rollouts.group_size)
    if (parts := options.get("minibatches", Updates.minibatches)) > rollouts:
        found.append(
            f"minibatches = {parts} is more than a step's {rollouts} rollouts (prompts_per_step * group_size): parts may have one sample"
        )
    return found


def _check_options(job: Job) -> None:
    adapter = ("lora_rank", "lora_alpha", "lora_targets") if job.options.get("lora_rank") is not None else ()  # checked by themselves
    with of_table("algorithm"):
        GRPOOptions.from_options(model_dir="", model_server_url="", **without(job.options, "metrics", *adapter))


def _credit_function(job: Job) -> Callable[..., Any] | None:
    """Return the function that `credit` names; None without one. Raises UsageError where it cannot be loaded."""
    if ":" not in (reference := str(job.options.get("credit", ""))):
        return None
    with of_table("algorithm"):
        return load_function(job.located(reference))


def fingerprint(job: Job, folder: Path) -> Fingerprint | None:
    """Return the fingerprint with which the run in `folder` is resumed; None if its policy is yet to be created. Raises what `policy_made`
    raises."""
    model_dir = policy_made(job, folder)
    return fingerprint_of(job, made(job, model_dir, ""), GRPORun.name) if model_dir is not None else None


def made(job: Job, model_dir: Path, server_url: str, **more: Any) -> GRPO:
    """Make the job's algorithm over a model and its server; `more` are arguments that a job does not set."""
    from agl_otel.algorithms.grpo.algorithm import GRPO

    return GRPO.from_options(
        model_dir=model_dir,
        model_server_url=server_url,
        rollout_config=job.agent.rollout_config,
        credit_function=_credit_function(job),
        **more,
        **served_options(job),
    )


class GRPORun(ServedRun):
    """The processes of one GRPO run over a store. Use `async with`; a folder that already holds the run resumes it."""

    name = "grpo"

    def _weights_to_serve(self, algorithm: GRPO) -> tuple[Path | None, int]:
        return algorithm.weights_to_serve(self.run, adapter_rank=adapter_rank(self.job))

    def algorithm(self, *, run: RunFolder | None = None, on_step: Callable[[StepReport], object] | None = None) -> GRPO:
        """Create the job's algorithm over this run's policy and model server."""
        more: dict[str, Any] = {"run_dir": run, "on_step": on_step, "validator": self.validate}
        return made(self.job, self.model_dir, self.server_url, **more)
