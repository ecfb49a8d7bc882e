"""What every search over prompts has: its data, its store, a journal, bounds on what it spends, and the best candidate so far.

A subclass says only what it tries next (`_search`). It draws from `self._source(name)`, never from `random` itself, and pays for
everything through `self.editor` and `self.evaluator`: then a run that was stopped anywhere goes on as if it had not been.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from agl_otel.adapters import TraceAdapter, TraceToMessages
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.metric_sinks import check_metrics, sinks_of
from agl_otel.algorithms.prompts.beam import score_of
from agl_otel.algorithms.prompts.candidates import Candidate, cleaned, prompts_in, template_problem
from agl_otel.algorithms.prompts.editor import Editor, SearchOverError, Spend
from agl_otel.algorithms.prompts.evaluate import Evaluation, Evaluator
from agl_otel.algorithms.prompts.journal import Journal, digest_of
from agl_otel.algorithms.run_log import RunLog, flat
from agl_otel.algorithms.utils import items, retry_lost_runner
from agl_otel.errors import SettingsError
from agl_otel.types import Dataset, NamedResources, PromptTemplate, RolloutConfig, TrainingStep

_log = logging.getLogger(__name__)


class PromptSearch(Algorithm):
    """Base of searches for better prompt templates.

    Args:
        async_openai_client: the editor: an AsyncOpenAI or anything with its `chat.completions.create`. None: AsyncOpenAI(), which reads
            OPENAI_API_KEY and OPENAI_BASE_URL (extra [apo]).
        temperature: of the editor's calls.
        rollout_batch_timeout: seconds for each batch of rollouts; what has not finished by then is cancelled and left out.
        rollout_config: of every rollout (timeouts, retries). None: `retry_lost_runner()`.
        run_dir: where the run is kept (journal.py); a run that is there already is gone on with, and nothing is paid for twice.
            None: in memory.
        seed: of every draw; None: another one for every new run.
        max_editor_calls: at most so many calls of the editor; None: no bound.
        max_editor_tokens: no further call once so many tokens are spent; None: no bound.
        max_rollouts: at most so many rollouts; None: no bound.
        metrics: where else figures are shown: "tensorboard", "wandb", "plots", or a metrics.MetricSink. None: TensorBoard's files and a
            picture in the run's folder, where it is kept and their packages are installed.
    """

    name: ClassVar[str]
    """In run.json and before run ids."""

    def __init__(
        self,
        async_openai_client: Any = None,
        *,
        temperature: float = 1.0,
        rollout_batch_timeout: float = 3600.0,
        rollout_config: RolloutConfig | None = None,
        run_dir: str | Path | None = None,
        seed: int | None = None,
        max_editor_calls: int | None = None,
        max_editor_tokens: int | None = None,
        max_rollouts: int | None = None,
        metrics: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        check_metrics(metrics)
        self.metrics = metrics
        self.client = async_openai_client
        self._own_client: Any = None
        self.temperature = temperature
        self.rollout_batch_timeout = rollout_batch_timeout
        self.rollout_config = rollout_config if rollout_config is not None else retry_lost_runner()
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.seed = seed
        self.max_editor_calls = max_editor_calls
        self.max_editor_tokens = max_editor_tokens
        self.max_rollouts = max_rollouts
        self.spend = Spend()
        """What the last run has spent, its stops included."""
        self.history: list[dict[str, Any]] = []
        """What the last run's steps came to: the lines of metrics.jsonl."""
        self.stopped_because = ""
        self.best_score = float("-inf")
        """On the whole validation set."""
        self._best: Candidate | None = None

    # --- overridden by subclasses

    def _options(self) -> dict[str, Any]:
        """The options that decide the course of a run, as JSON."""
        return {"temperature": self.temperature}

    async def _search(self, seed: Candidate, train: Sequence[Any], val: Sequence[Any]) -> str:
        """Look for better candidates, and say why it ended. Raises SearchOverError."""
        raise NotImplementedError

    def _check(self, train: Sequence[Any], val: Sequence[Any], adapter: Any) -> None:
        """Raise ValueError where the search cannot work with what it was given."""
        if self.client is None:
            self._own_client = default_client()
        if not isinstance(adapter, TraceToMessages):
            raise ValueError(
                f"{type(self).__name__} reads messages, not a {type(adapter).__name__}: give Trainer(adapter=TraceToMessages())"
            )
        if not train:
            raise ValueError(f"{type(self).__name__} needs train_dataset: tasks by whose rollouts prompts are improved")
        if not val:
            raise ValueError(f"{type(self).__name__} needs val_dataset: tasks by whose rollouts prompts are chosen")
        for name, prompt in prompts_in(self.get_initial_resources()).items():
            if why := template_problem(prompt.template, prompt.template, prompt.engine):
                raise ValueError(
                    f"{type(self).__name__} cannot edit prompt {name}: {why} (one that format() does not fill in may be engine='jinja')"
                )

    # --- what a user calls

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Search. Raises ValueError where data, an adapter or a prompt template are missing, and what Journal raises.

        Whatever ends it, `get_best_prompt` gives the best so far.
        """
        train, val = items(train_dataset), items(val_dataset)
        adapter, resources = self._adapter(), self.get_initial_resources() or {}
        prompts = prompts_in(resources)
        self._check(train, val, adapter)
        if not prompts:
            raise ValueError(f"{type(self).__name__} needs a prompt to begin with: give initial_resources={{'name': PromptTemplate(…)}}")
        begin = {name: prompt.template for name, prompt in prompts.items()}
        options = {**self._options(), "prompts": begin, "train": digest_of(train), "val": digest_of(val)}
        journal = Journal(self.run_dir, algorithm=self.name, options=options, seed=self.seed)
        try:
            self._prepare_run(journal, resources, adapter)
            seed = self._made(begin)
            self._best = self._best_before = seed
            self._step_began = time.time()
            async with self._run_log:
                await self._run_log.begin([])
                try:
                    self.stopped_because = await self._search(seed, train, val)
                except SearchOverError as over:
                    self.stopped_because = str(over)
                _log.info("%s ends: %s. Best: %s with %.3f", self.name, self.stopped_because, self._best.version, self.best_score)
                await self.evaluator.publish(self._best)
                self._note_best(journal)
        finally:
            journal.close()
            if self._own_client is not None:
                await self._own_client.close()

    def get_best_prompt(self) -> PromptTemplate:
        """The first prompt template of the best candidate so far. Raises ValueError before a run."""
        return next(iter(self.get_best_prompts().values()))

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """{resource name: template} of the best candidate so far. Raises ValueError before a run."""
        if self._best is None:
            raise ValueError(f"{type(self).__name__} has no best prompt yet: call it after Trainer.fit")
        prompts = prompts_in(self.get_initial_resources())
        return {name: prompts[name].model_copy(update={"template": text}) for name, text in self._best.templates.items()}

    # --- what subclasses use

    def _prepare_run(self, journal: Journal, resources: NamedResources, adapter: TraceAdapter[Any]) -> None:
        self.spend, self.history, self.best_score = Spend(), [], float("-inf")
        self._journal, self._seed, self._versions = journal, journal.seed, 0
        self._run_log = RunLog(
            self.get_store(),
            run_id=journal.run_id,
            algorithm=self.name,
            folder=journal.folder,
            sinks=sinks_of(self.metrics, has_folder=journal.folder is not None),
        )
        self._engines = {name: prompt.engine for name, prompt in prompts_in(resources).items()}
        self.editor = Editor(
            self.client if self.client is not None else self._own_client,
            journal,
            self.spend,
            max_calls=self.max_editor_calls,
            max_tokens=self.max_editor_tokens,
            temperature=self.temperature,
        )
        self.evaluator = Evaluator(
            self.get_store(), journal, adapter, resources, self.spend, self.rollout_batch_timeout, self.max_rollouts, self.rollout_config
        )

    def _source(self, name: str) -> random.Random:
        """A source of draws that is the same whenever the run comes to the place called `name`."""
        return random.Random(f"{self._seed}/{name}")

    def _made(self, templates: Mapping[str, str], *parents: Candidate) -> Candidate:
        """A candidate with the next version."""
        candidate = Candidate(f"v{self._versions}", dict(templates), tuple(parent.version for parent in parents))
        self._versions += 1
        return candidate

    def _child(self, parent: Candidate, name: str, answer: str, *others: Candidate) -> Candidate | None:
        """The candidate with `answer` in the place of one prompt; None where the answer is no template that could be used."""
        text = cleaned(answer)
        if not text:
            return None
        if why := template_problem(text, parent.templates[name], self._engines[name]):
            _log.warning("an edit of %s is left out: %s", parent.version, why)
            return None
        return self._made({**parent.templates, name: text}, parent, *others)

    def _take(self, candidate: Candidate, evaluation: Evaluation) -> bool:
        """Keep the candidate as the best where it is strictly better on the whole validation set; whether it is."""
        better = evaluation.score > self.best_score
        if better:
            self._best, self.best_score = candidate, evaluation.score
            self._note_best(self._journal)
        return better

    def _note_best(self, journal: Journal) -> None:
        assert self._best is not None
        score = None if self.best_score == float("-inf") else self.best_score
        journal.best({**self._best.described(), "score": score, "stopped_because": self.stopped_because})

    async def _record_step(self, number: int, **row: Any) -> None:
        """Step `number` is done: one line of history and metrics.jsonl, and what the store is told of it."""
        assert self._best is not None
        score = None if self.best_score == float("-inf") else self.best_score
        best = {"best_version": self._best.version, "best_score": score}
        self.history.append({**row, **best, **self.spend.described()})
        self._journal.metric(self.history[-1])
        _log.info("%s: %s", self.name, self.history[-1])
        told = self._told(number)
        numbers = {name: value for name, value in told.metrics.items() if isinstance(value, int | float)}
        await self._run_log.note(told, {"step": number, **numbers})

    def _told(self, number: int) -> TrainingStep:
        """What the store is told of a step."""
        assert self._best is not None
        done, self.evaluator.since_step[:] = [*self.evaluator.since_step], []
        rewards = [reward for each in done for reward in each.rewards]
        known = [reward for reward in rewards if reward is not None]
        began, self._step_began = self._step_began, time.time()
        before, self._best_before = self._best_before, self._best
        metrics: dict[str, Any] = {"rollouts": len(rewards), "reward_mean": score_of(known), **self.spend.described()}
        return TrainingStep(
            run_id=self._run_log.run_id,
            algorithm=self.name,
            step=number,
            resources_id=self.evaluator.resources_id(self._best),
            version_before=before.version,
            version_after=self._best.version,
            samples=len(known),
            refused=len(rewards) - len(known),
            start_time=began,
            end_time=self._step_began,
            metrics=flat(metrics | ({"best_score": self.best_score} if self.best_score != float("-inf") else {})),
            attempts=[(rollout_id, "") for each in done for rollout_id in each.rollout_ids],
        )


def require_openai() -> None:
    """Raise SettingsError that says what to install where the openai package is missing."""
    if find_spec("openai") is None:
        raise SettingsError("the editor needs the [apo] extra (openai is missing): pip install 'agl-otel[apo]'")


def default_client(**options: Any) -> Any:
    """An AsyncOpenAI as `options`, else the environment, say. Raises SettingsError where the openai package or a key are missing."""
    require_openai()
    from openai import AsyncOpenAI, OpenAIError

    try:
        return AsyncOpenAI(**options)
    except OpenAIError as error:
        raise SettingsError(f"the editor cannot be asked: {error}") from error
