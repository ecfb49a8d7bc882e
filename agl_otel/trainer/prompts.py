"""A search for prompts as a job file describes it: APO, GEPA or random search over the job's agent, with runner processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from pydantic import BaseModel

from agl_otel.adapters import TraceToMessages
from agl_otel.algorithms.metrics import check_metrics
from agl_otel.algorithms.prompts import APO, GEPA, PromptSearch, RandomSearch
from agl_otel.algorithms.prompts.search import default_client, require_openai
from agl_otel.errors import SettingsError
from agl_otel.trainer.job import Job
from agl_otel.trainer.options import options_of
from agl_otel.trainer.run import JobRun, unless

SEARCHES: Final[dict[str, type[PromptSearch]]] = {kind.name: kind for kind in (APO, GEPA, RandomSearch)}
_SET_BY_JOB: Final = frozenset({"async_openai_client", "run_dir", "rollout_config", "more", "_poml_trace"})
_FILES: Final = ("gradient_prompts", "edit_prompts", "reflect_prompt", "merge_prompt")


def options_model(name: str) -> type[BaseModel]:
    """[algorithm] of a job that searches for prompts: its name and its options, which are the algorithm's own keyword arguments."""
    return options_of(name, PromptSearch, SEARCHES[name], hidden=_SET_BY_JOB)


def check(job: Job) -> None:
    """Raise SettingsError where something that the job needs is not installed; before anything is started."""
    check_metrics(job.options.get("metrics"))
    if job.algorithm["name"] != RandomSearch.name:
        require_openai()


class PromptSearching(JobRun):
    """A search for prompts over a store. Use `async with`; a folder that holds the run already goes on with it."""

    async def fit(self, train: Sequence[Any], val: Sequence[Any]) -> PromptSearch:
        """Search; the algorithm afterwards, with its best prompt, history and spend. Raises what PromptSearch.run raises."""
        adapter = TraceToMessages()
        async with AsyncExitStack() as stack:
            algorithm = self.algorithm(await stack.enter_async_context(self._editor()) if self._asks else None)
            algorithm.set_store(self.store)
            algorithm.set_adapter(adapter)
            algorithm.set_initial_resources(self.job.resources)
            await stack.enter_async_context(self.runners())
            await unless(self.failed, algorithm.run(train, val))
        return algorithm

    @property
    def _asks(self) -> bool:
        return self.job.algorithm["name"] != RandomSearch.name

    def algorithm(self, editor: Any) -> PromptSearch:
        """The job's algorithm, which asks `editor`, an AsyncOpenAI."""
        kind = SEARCHES[self.job.algorithm["name"]]
        given = {name: self._located(value) if name in _FILES else value for name, value in self.job.options.items()}
        given |= {"async_openai_client": editor} if self._asks else {}
        return kind(run_dir=self.folder, rollout_config=self.job.agent.rollout_config, **given)

    def _located(self, files: Any) -> Any:
        """Prompt files are relative to the job file."""
        return [self.job.folder / file for file in files] if isinstance(files, list | tuple) else self.job.folder / files

    def _editor(self) -> Any:
        spec = self.job.editor
        key = os.environ.get(spec.api_key_env)
        if key is None:
            raise SettingsError(
                f"[editor] api_key_env: the environment variable {spec.api_key_env} is not set (any value, where no key is needed)"
            )
        return default_client(api_key=key, base_url=spec.base_url, timeout=spec.timeout_seconds)
