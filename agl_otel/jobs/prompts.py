"""A run of a job file that searches for prompts: APO, GEPA or random search over the job's agent, with runner processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.adapters import TraceToMessages
from agl_otel.algorithms.prompts import APO, GEPA, PromptSearch, RandomSearch, poml
from agl_otel.algorithms.prompts.candidates import prompts_in, template_problem
from agl_otel.algorithms.prompts.random_search import combinations
from agl_otel.algorithms.prompts.search import BATCH_SECONDS, check_prompts, default_client, require_openai
from agl_otel.algorithms.run_folder import Fingerprint
from agl_otel.errors import SettingsError
from agl_otel.jobs.algorithm_table import Need, check_sinks, of_table, options_of, without
from agl_otel.jobs.job import Job
from agl_otel.jobs.run import JobRun, unless_failed

SEARCHES: Final[dict[str, type[PromptSearch]]] = {kind.name: kind for kind in (APO, GEPA, RandomSearch)}
_SET_BY_JOB: Final = frozenset({"async_openai_client", "run_dir", "rollout_config", "more", "_poml_trace"})
_SAMPLES: Final = [dict.fromkeys(("number", "status", "reward", "task", "messages", "spans"), "")]
_FILES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{option: {"prompt": "", "samples": _SAMPLES} for option in ("gradient_prompts", "reflect_prompt")},
    "edit_prompts": {"prompt": "", "critique": ""},
    "merge_prompt": dict.fromkeys(("prompt", "other", "first_wins", "other_wins"), ""),
}
"""{option that names POML files: the names that these may ask for, with empty values}."""


def options_model(name: str) -> type[BaseModel]:
    """Return the model of [algorithm] of a prompt search: its name, and the algorithm's keyword arguments as options."""
    called_otherwise = {"temperature"} if name == APO.name else set[str]()  # diversity_temperature, as in 0.3
    return options_of(name, PromptSearch, SEARCHES[name], hidden=_SET_BY_JOB | called_otherwise)


def needs(job: Job) -> list[Need]:
    """Return the checks of what a search needs: packages, an initial prompt, prompt files, and the editor's API key."""
    asks = job.algorithm["name"] != RandomSearch.name
    return [
        lambda: check_sinks(job.options.get("metrics")),
        lambda: _check_resources(job),
        lambda: _check_options(job),
        lambda: _check_files(job),
        lambda: _check_budget(job),
        *([require_openai, lambda: key_of(job)] if asks else []),
    ]


def _check_options(job: Job) -> None:
    if job.algorithm["name"] == APO.name:
        with of_table("algorithm"):
            APO(**without(job.options, "metrics"))
    seconds, batch = job.agent.timeout_seconds, job.options.get("rollout_batch_timeout", BATCH_SECONDS)
    if seconds > batch:
        raise SettingsError(
            f"[agent] timeout_seconds = {seconds:g}: it must be at most rollout_batch_timeout ({batch:g}), because the search cancels a "
            "batch's attempts that still run; give a smaller one, or a greater rollout_batch_timeout of [algorithm]"
        )


def _check_budget(job: Job) -> None:
    most = job.options.get("max_rollouts")
    if most is not None and job.improve is None and not job.has_wrong("[data] val") and (needed := len(job.tasks("val"))) > most:
        raise SettingsError(
            f"[algorithm] max_rollouts = {most}: it must be at least {needed}, the tasks of [data] val, because the first prompt is scored "
            "on all of them; give such a value, or leave it out"
        )


def _check_resources(job: Job) -> None:
    if not prompts_in(job.resources) and not job.has_wrong("[resources]"):
        raise SettingsError(f"[resources] has no prompt for {job.algorithm['name']} to begin with: give one, name = 'text'")

    for name, prompt in prompts_in(job.resources).items():
        if not str(prompt.template).strip():
            raise SettingsError(f"[resources] {name} is empty: it must be the prompt to begin with; write it")
        if why := template_problem(prompt.template, prompt.template, prompt.engine):
            raise SettingsError(f"[resources] {name} cannot be edited: {why}; write it with balanced braces, or as engine = 'jinja'")
    with of_table("algorithm"):
        check_prompts(job.options.get("agent_match"), list(prompts_in(job.resources)))
    if "choices" in job.options:
        with of_table("algorithm"):
            combinations(job.options["choices"], {name: prompt.template for name, prompt in prompts_in(job.resources).items()})


def _check_files(job: Job) -> None:
    for option, values in _FILES.items():
        given = job.options.get(option, [])
        for file in given if isinstance(given, list | tuple) else [given]:
            if not (job.folder / file).is_file():
                raise SettingsError(f"[algorithm] {option}: there is no file {job.folder / file}")
            try:
                poml.check(job.folder / file, values)
            except SettingsError as error:
                raise SettingsError(f"[algorithm] {option}: {error}; name a prompt file, or leave it out") from error


def key_of(job: Job) -> str:
    """Return the editor's API key. Raises SettingsError if its variable is not set."""
    key = os.environ.get(job.editor.api_key_env)
    if key is None:
        raise SettingsError(
            f"[editor] api_key_env: the environment variable {job.editor.api_key_env} is not set (any value, where no key is needed)"
        )
    return key


def fingerprint(job: Job, folder: Path) -> Fingerprint:
    """Return the fingerprint with which the run in `folder` is begun or resumed."""
    algorithm = _made(job, folder)
    return Fingerprint.of(algorithm.name, algorithm.run_fingerprint(job.tasks("train"), job.tasks("val"), job.resources), algorithm.seed)


def _made(job: Job, folder: Path, **more: Any) -> PromptSearch:
    given = {name: _located(job, value) if name in _FILES else value for name, value in job.options.items()}
    return SEARCHES[job.algorithm["name"]](run_dir=folder, rollout_config=job.agent.rollout_config, **given, **more)


def _located(job: Job, files: Any) -> Any:
    """Resolve prompt files relative to the job file."""
    return [job.folder / file for file in files] if isinstance(files, list | tuple) else job.folder / files


class PromptSearchRun(JobRun):
    """A search for prompts over a store. Use `async with`; a folder that already holds the run resumes it."""

    async def fit(self, train: Sequence[Any], val: Sequence[Any]) -> PromptSearch:
        """Search with runners, as `search` does."""
        async with self.runners():
            return await self.search(train, val)

    async def search(self, train: Sequence[Any], val: Sequence[Any], *, aside: bool = False) -> PromptSearch:
        """Search; return the algorithm with its best prompt, history and spend. Raises what PromptSearch.run raises.

        `aside`: as PromptSearch.aside.
        """
        adapter = TraceToMessages()  # the algorithm refers to it weakly
        async with AsyncExitStack() as stack:
            algorithm = self.algorithm(await stack.enter_async_context(self._editor()) if self._asks else None)
            algorithm.aside = aside
            algorithm.set_store(self.store)
            algorithm.set_adapter(adapter)
            algorithm.set_initial_resources(self.job.resources)
            await unless_failed(self.failed, algorithm.run(train, val))
        return algorithm

    @property
    def _asks(self) -> bool:
        return self.job.algorithm["name"] != RandomSearch.name

    def algorithm(self, editor: Any) -> PromptSearch:
        """Create the job's algorithm, which queries `editor`, an AsyncOpenAI."""
        return _made(self.job, self.folder, **({"async_openai_client": editor} if self._asks else {}))

    def _editor(self) -> Any:
        spec = self.job.editor
        return default_client(api_key=key_of(self.job), base_url=spec.base_url, timeout=spec.timeout_seconds)
