"""A training run of a job file on verl: its policy, its runners, and VERL over them. verl is not imported: it runs in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from agl_otel.algorithms.hub import origin_of
from agl_otel.algorithms.run_folder import Fingerprint, RunFolder, lock_run
from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.algorithms.verl.algorithm import VERL, require_extra
from agl_otel.algorithms.verl.keys import get, has, translate
from agl_otel.errors import SettingsError, UsageError
from agl_otel.jobs.algorithm_table import Need, check_timeouts, of_table, options_of
from agl_otel.jobs.job import Job
from agl_otel.jobs.memory import Findings
from agl_otel.jobs.run import JobRun, unless_failed
from agl_otel.jobs.served import check_policy, policy_made, prepare_policy
from agl_otel.service.lock import FileLock

if TYPE_CHECKING:
    from agl_otel.jobs.model_check import ModelFacts

MODEL: Final = "actor_rollout_ref.model.path"
_SET_BY_JOB: Final = frozenset({"trainer_cls", "daemon_cls", "model_dir", "run_dir", "rollout_config", "on_step"})
_AGENT: Final = {"function", "command", "grader"}


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] of a verl job: its name, its options, and [algorithm.config], verl's own config."""
    return options_of(name, VERL, hidden=_SET_BY_JOB)


def needs(job: Job) -> list[Need]:
    """Return the checks of what a verl job needs: the extra, known keys of verl's config, and a model."""
    return [
        require_extra,
        lambda: _check_options(job),
        lambda: check_timeouts(job, job.options.get("step_timeout_seconds")),
        lambda: _check_model(job),
    ]


def _check_options(job: Job) -> None:
    with of_table("algorithm"):
        _made(job, None).check()


def _check_model(job: Job) -> Findings:
    """Return warnings. Raises UsageError if two models are named, SettingsError if the policy is not a model, or too small for the config's
    lengths."""
    with of_table("algorithm"):
        config = translate(job.options["config"]).config
    if has(config, MODEL) and job.policy.model != "tiny":
        raise UsageError(f"[policy] model and {MODEL} both name the model: give one")

    def check_lengths(facts: ModelFacts) -> Findings:
        context, asked = facts.context, [get(config, path) for path in ("data.max_prompt_length", "data.max_response_length")]
        if all(isinstance(each, int) for each in asked) and sum(asked) > context:
            raise SettingsError(
                f"[algorithm] config.data.max_response_length = {asked[1]}: with max_prompt_length ({asked[0]}) it must be at most "
                f"{context}, because that is the context of {job.policy.model}; give smaller ones"
            )
        return Findings()

    return Findings() if has(config, MODEL) else check_policy(job, check_lengths)


def fingerprint(job: Job, folder: Path) -> Fingerprint | None:
    """Return the fingerprint with which the run in `folder` is resumed; None if its policy is yet to be created. Raises what `policy_made`
    raises."""
    model_dir = None if _names_model(job) else policy_made(job, folder)
    return _fingerprint(job, _made(job, model_dir)) if model_dir is not None or _names_model(job) else None


def _names_model(job: Job) -> bool:
    """Whether the config names the model, in place of [policy]."""
    return has(translate(job.options["config"]).config, MODEL)


def _made(job: Job, model_dir: Path | None, **more: Any) -> VERL:
    made = VERL(model_dir=model_dir, rollout_config=retry_lost_runner(job.agent.timeout_seconds), **more, **job.options)
    made.credit_reference = job.located(made.credit_reference)
    return made


def _fingerprint(job: Job, algorithm: VERL) -> Fingerprint:
    options = algorithm.run_fingerprint(job.tasks("train"), job.tasks("val"))
    return Fingerprint.of(algorithm.name, {**options, "agent": job.agent.model_dump(include=set(_AGENT))}, algorithm.seed)


class VerlRun(JobRun):
    """The processes of one verl run over a store. Use `async with`; a folder that already holds the run resumes it."""

    _lock: FileLock
    _model_dir: Path | None = None

    async def _start(self) -> None:
        require_extra()
        _check_model(self.job)
        self._lock = lock_run(self.folder)  # before the folder gets a policy
        self._exit.callback(self._lock.close)
        if not _names_model(self.job):
            self._model_dir = await prepare_policy(self.job, self.folder)

    async def fit(self, train: Sequence[Any], val: Sequence[Any], *, on_step: Callable[[dict[str, Any]], object] | None = None) -> VERL:
        """Train; return the algorithm with its metrics. Raises what VERL.run raises."""
        algorithm = _made(self.job, self._model_dir, on_step=on_step)
        begun = _fingerprint(self.job, algorithm)
        model = origin_of(self._model_dir) if self._model_dir is not None else None
        algorithm.run_dir = RunFolder(
            self.folder, algorithm=begun.algorithm, options=begun.options, seed=begun.seed, model=model, lock=self._lock
        )
        algorithm.set_store(self.store)
        await unless_failed(self.failed, algorithm.run(train, val))
        return algorithm
