"""The base class of prompt searches: data, store, journal, limits on spending, and the best candidate so far.

A subclass implements `_search`. It must use random numbers of `self._source(name)` only, and call the editor and run rollouts only through
`self.editor` and `self.evaluator`: then a run that was stopped at any point resumes with the same result.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from agl_otel.adapters import TraceAdapter, TraceToMessages
from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.metric_sinks import check_metrics, sinks_of
from agl_otel.algorithms.options import MONTH_SECONDS, AgentMatch, Seed, checked
from agl_otel.algorithms.prompts.candidates import Candidate, cleaned, prompts_in, template_problem
from agl_otel.algorithms.prompts.editor import Editor, SearchOverError, Spend
from agl_otel.algorithms.prompts.evaluate import Evaluation, Evaluator
from agl_otel.algorithms.prompts.journal import Journal, digest_of
from agl_otel.algorithms.run_log import RunLog, flat
from agl_otel.algorithms.utils import items, retry_lost_runner
from agl_otel.errors import SettingsError, UsageError
from agl_otel.types import Dataset, NamedResources, PromptTemplate, RolloutConfig, TrainingStep
from agl_otel.types.scores import Score

_log = logging.getLogger(__name__)

EditorTemperature = Annotated[float, Field(ge=0, le=2, description="OpenAI's API takes no other")]
Agents = (
    AgentMatch
    | Annotated[Mapping[str, AgentMatch], Field(min_length=1, description="a search that edits no prompt changes nothing")]
    | None
)
"""A pattern for the agents of all prompts, or {name of a prompt that is edited: pattern for its agents}; None: all prompts, every agent."""
BATCH_SECONDS: Final = 3600.0
BatchTimeout = Annotated[
    float, Field(ge=1, le=MONTH_SECONDS, description="the search waits for each batch, which takes seconds, and not for ever")
]
MaxRollouts = Annotated[int, Field(ge=1, le=1_000_000_000, description="a search without a rollout finds nothing")]
MaxSpend = Annotated[int, Field(ge=1, le=10**15, description="without a call of the editor no prompt is changed")]
ModelName = Annotated[str, Field(min_length=1, pattern=r"\S", description="the editor is asked for it by name")]


@checked
class PromptSearch(Algorithm):
    """Base class of searches for better prompt templates.

    Args:
        async_openai_client: client of the editor: an AsyncOpenAI or any object with its `chat.completions.create`. None: AsyncOpenAI(),
            which reads OPENAI_API_KEY and OPENAI_BASE_URL (extra [apo]).
        temperature: sampling temperature of the editor.
        rollout_batch_timeout: seconds for each batch of rollouts; unfinished ones are then cancelled and left out.
        rollout_config: retries and time limits of rollouts. None: `retry_lost_runner()`.
        run_dir: folder of the run (journal.py); an existing run is resumed without repeating rollouts or calls. None: in memory.
        seed: seed of all random choices; None: random for a new run.
        max_editor_calls: limit on the editor's calls; None: no limit.
        max_editor_tokens: no call starts once this many tokens are spent; None: no limit.
        max_rollouts: limit on rollouts; None: no limit.
        metrics: metric sinks: "tensorboard", "wandb", "plots", or MetricSink objects. None: TensorBoard files and a picture in the run's
            folder, if there is one and their packages are installed.
    """

    name: ClassVar[str]
    """Name in run.json, and prefix of run ids."""

    def __init__(
        self,
        async_openai_client: Any = None,
        *,
        temperature: EditorTemperature = 1.0,
        rollout_batch_timeout: BatchTimeout = BATCH_SECONDS,
        rollout_config: RolloutConfig | None = None,
        run_dir: str | Path | None = None,
        seed: Seed | None = None,
        max_editor_calls: MaxSpend | None = None,
        max_editor_tokens: MaxSpend | None = None,
        max_rollouts: MaxRollouts | None = None,
        metrics: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        check_metrics(metrics)
        self.metrics = metrics
        self.agent_match: Agents = None
        """Which prompts are edited, and whose model calls the editor is shown; set by searches that have an editor."""
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
        """What the last run has spent, including earlier starts."""
        self.aside = False
        """Whether the best candidate is published without becoming the default of rollouts that name no resources."""
        self.history: list[dict[str, Any]] = []
        """The steps of the last run: the lines of metrics.jsonl."""
        self.stopped_because = ""
        """Why the last run ended."""
        self.best_score = float("-inf")
        """The best candidate's score on the whole validation set."""
        self._best: Candidate | None = None

    # --- overridden by subclasses

    def _options(self) -> dict[str, Any]:
        """Return the options that are part of the run's fingerprint, as JSON."""
        return {"temperature": self.temperature, "agent_match": self.agent_match}

    def run_fingerprint(self, train: Sequence[Any], val: Sequence[Any], resources: NamedResources) -> dict[str, Any]:
        """Return the run's fingerprint, as JSON: the options in its run.json."""
        begin = {name: prompt.template for name, prompt in prompts_in(resources).items()}
        return {**self._options(), "prompts": begin, "train": digest_of(train), "val": digest_of(val)}

    async def _search(self, seed: Candidate, train: Sequence[Any], val: Sequence[Any]) -> str:
        """Search for better candidates and return why the search ended. Raises SearchOverError where a limit is reached."""
        raise NotImplementedError

    def _check(self, train: Sequence[Any], val: Sequence[Any], adapter: Any) -> None:
        """Create the default client if needed. Raises ValueError where data, adapter or prompts do not suit the search."""
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
        prompts = prompts_in(self.get_initial_resources())
        check_prompts(self.agent_match, list(prompts))
        if self.agent_match is not None and adapter.agent_match is not None:
            raise UsageError(
                f"agent_match of {type(self).__name__} is {self.agent_match!r}, and the adapter's is {adapter.agent_match!r}: give one"
            )
        for name, prompt in prompts.items():
            if why := template_problem(prompt.template, prompt.template, prompt.engine):
                raise ValueError(
                    f"{type(self).__name__} cannot edit prompt {name}: {why} (one that format() does not fill in may be engine='jinja')"
                )

    # --- called by users

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]  # async, as the base allows
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Search and publish the best candidate.

        After an error, too, `get_best_prompt` returns the best candidate so far. Raises ValueError where data, adapter or prompts are
        missing or do not suit the search, DataError where the initial prompts give no reward, and what Journal raises.
        """
        train, val = items(train_dataset), items(val_dataset)
        adapter, resources = self._adapter(), self.get_initial_resources() or {}
        prompts = prompts_in(resources)
        self._check(train, val, adapter)
        if not prompts:
            raise ValueError(f"{type(self).__name__} needs a prompt to begin with: give initial_resources={{'name': PromptTemplate(…)}}")
        begin = {name: prompt.template for name, prompt in prompts.items()}
        options = self.run_fingerprint(train, val, resources)
        journal = Journal(self.run_dir, algorithm=self.name, options=options, seed=self.seed)
        try:
            self._prepare_run(journal, resources, adapter)
            seed = self._new_candidate(begin)
            self._best = self._best_before = seed
            self._step_began = time.time()
            async with self._run_log:
                await self._run_log.begin([])
                try:
                    self.stopped_because = await self._search(seed, train, val)
                except SearchOverError as over:
                    self.stopped_because = str(over)
                _log.info("%s ends: %s. Best: %s with %.3f", self.name, self.stopped_because, self._best.version, self.best_score)
                await self.evaluator.publish(self._best, aside=self.aside)
                self._note_best(journal)
        finally:
            journal.close()
            if self._own_client is not None:
                await self._own_client.close()

    def get_best_prompt(self) -> PromptTemplate:
        """Return the first prompt template of the best candidate so far. Raises ValueError before a run."""
        return next(iter(self.get_best_prompts().values()))

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """Return {resource name: template} of the best candidate so far. Raises ValueError before a run."""
        if self._best is None:
            raise ValueError(f"{type(self).__name__} has no best prompt yet: call it after Trainer.fit")
        prompts = prompts_in(self.get_initial_resources())
        return {name: prompts[name].model_copy(update={"template": text}) for name, text in self._best.templates.items()}

    # --- used by subclasses

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

    def _edited(self, candidate: Candidate) -> list[str]:
        """Return the names of the prompts that are edited, in the order of the resources."""
        return [name for name in candidate.templates if not isinstance(self.agent_match, Mapping) or name in self.agent_match]

    def _agents(self, name: str) -> str | None:
        """Return the pattern for the agents whose calls the editor is shown for a prompt; None: it is shown all."""
        return self.agent_match.get(name) if isinstance(self.agent_match, Mapping) else self.agent_match

    def _source(self, name: str) -> random.Random:
        """Create the random source called `name`, which depends only on the run's seed and the name."""
        return random.Random(f"{self._seed}/{name}")

    def _new_candidate(self, templates: Mapping[str, str], *parents: Candidate) -> Candidate:
        """Create a candidate with the next version number."""
        candidate = Candidate(f"v{self._versions}", dict(templates), tuple(parent.version for parent in parents))
        self._versions += 1
        return candidate

    def _child(self, parent: Candidate, name: str, answer: str, *others: Candidate) -> Candidate | None:
        """Create a candidate in which `answer` replaces one of the parent's prompts; None where the answer is not a valid template."""
        text = cleaned(answer)
        if not text:
            return None
        if problem := template_problem(text, parent.templates[name], self._engines[name]):
            _log.warning("an edit of %s is left out: %s", parent.version, problem)
            return None
        return self._new_candidate({**parent.templates, name: text}, parent, *others)

    def _update_best(self, candidate: Candidate, evaluation: Evaluation) -> None:
        """Make the candidate the best if its score on the whole validation set is strictly better."""
        if evaluation.score > self.best_score:
            self._best, self.best_score = candidate, evaluation.score
            self._note_best(self._journal)

    def _note_best(self, journal: Journal) -> None:
        assert self._best is not None
        score = None if self.best_score == float("-inf") else self.best_score
        journal.best({**self._best.described(), "score": score, "stopped_because": self.stopped_because})

    async def _record_step(self, number: int, **row: Any) -> None:
        """Record a completed step in the history, metrics.jsonl, the store and the metric sinks."""
        assert self._best is not None
        score = None if self.best_score == float("-inf") else self.best_score
        best = {"best_version": self._best.version, "best_score": score}
        self.history.append({**row, **best, **self.spend.described()})
        self._journal.metric(self.history[-1])
        _log.info("%s: %s", self.name, self.history[-1])
        step = self._training_step(number)
        numbers = {name: value for name, value in step.metrics.items() if isinstance(value, int | float)}
        await self._run_log.note(step, {"step": number, **numbers})

    def _training_step(self, number: int) -> TrainingStep:
        """Summarise the evaluations since the last step, which are then cleared."""
        assert self._best is not None
        done, self.evaluator.since_step[:] = [*self.evaluator.since_step], []
        rewards = [reward for each in done for reward in each.rewards]
        known = [reward for reward in rewards if reward is not None]
        began, self._step_began = self._step_began, time.time()
        before, self._best_before = self._best_before, self._best
        metrics: dict[str, Any] = {"rollouts": len(rewards), "reward_mean": Score.of(rewards).mean, **self.spend.described()}
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


def check_prompts(agent_match: Agents, prompts: Sequence[str]) -> None:
    """Raise UsageError where `agent_match` names a prompt that is not one of these."""
    if isinstance(agent_match, Mapping) and (unknown := sorted(set(agent_match) - set(prompts))):
        raise UsageError(f"agent_match names {', '.join(unknown)}: the initial resources' prompts are {', '.join(prompts)}; name these")


def require_openai() -> None:
    """Raise SettingsError, which names the extra to install, where the openai package is missing."""
    if find_spec("openai") is None:
        raise SettingsError("the editor needs the [apo] extra (openai is missing): pip install 'agl-otel[apo]'")


def default_client(**options: Any) -> Any:
    """Create an AsyncOpenAI from `options` and the environment. Raises SettingsError where the openai package or a key is missing."""
    require_openai()
    from openai import AsyncOpenAI, OpenAIError

    try:
        return AsyncOpenAI(**options)
    except OpenAIError as error:
        raise SettingsError(f"the editor cannot be called: {error}") from error
