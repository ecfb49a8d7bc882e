"""GEPA: reflective evolution of prompts with a Pareto front of candidates.

After GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning (Agrawal et al., arXiv:2507.19457), algorithm 1: a parent is
sampled from the Pareto front (pareto.py), a model reflects on a minibatch of its rollouts and rewrites one of its prompts, and the child
joins the pool if it scores better on the same tasks. After a child has joined, two candidates of the front may be merged: several prompts
by the system-aware merge (algorithm 4), a single prompt by the editor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from agl_otel.algorithms.options import checked
from agl_otel.algorithms.prompts import pareto
from agl_otel.algorithms.prompts.candidates import Candidate
from agl_otel.algorithms.prompts.editor import EditorError
from agl_otel.algorithms.prompts.evaluate import Evaluation
from agl_otel.algorithms.prompts.poml import WORDING, render
from agl_otel.algorithms.prompts.search import Agents, MaxRollouts, ModelName, PromptSearch
from agl_otel.algorithms.utils import batch_iter_over_dataset
from agl_otel.types.scores import MAX_REWARD

T = TypeVar("T")
REFLECT_PROMPT = WORDING / "reflect.poml"
MERGE_PROMPT = WORDING / "merge.poml"
SHOWN_WINS = 3  # number of tasks won by each prompt that the editor sees for a merge


@checked
class GEPA(PromptSearch, Generic[T]):
    """Improves the prompt templates of the initial resources, in turn. Needs the adapter TraceToMessages and both data sets.

    Args:
        async_openai_client: client of the editor; see PromptSearch.
        reflection_model: model that reflects on rollouts and writes prompts.
        minibatch_size: number of training tasks for one reflection, on which parent and child are compared.
        max_iterations: limit on mutations and merges together.
        max_merges: limit on attempted merges; 0: none.
        max_rollouts: the rollout budget; None: limited by max_iterations only.
        agent_match: show the editor the model calls of agents whose name matches this regular expression alone; {prompt: expression} names
            the prompts that are edited, and the agents of each. None: all prompts, every agent.
        perfect_reward: a parent with at least this reward on each task of its minibatch is not mutated; None: always mutate.
        reflect_prompt, merge_prompt: POML files. Default: REFLECT_PROMPT, MERGE_PROMPT.
        more: PromptSearch's options.
    """

    name = "gepa"

    def __init__(
        self,
        async_openai_client: Any = None,
        *,
        reflection_model: ModelName = "gpt-5-mini",
        minibatch_size: Annotated[int, Field(ge=1, le=100_000, description="a reflection is on at least one rollout")] = 3,
        max_iterations: Annotated[int, Field(ge=1, le=1_000_000, description="a search without an iteration changes nothing")] = 20,
        max_merges: Annotated[int, Field(ge=0, le=1_000_000, description="0 is none")] = 5,
        max_rollouts: MaxRollouts | None = None,
        agent_match: Agents = None,
        perfect_reward: Annotated[float | None, Field(ge=-MAX_REWARD, le=MAX_REWARD, description="rewards are compared with it")] = 1.0,
        reflect_prompt: str | Path = REFLECT_PROMPT,
        merge_prompt: str | Path = MERGE_PROMPT,
        **more: Any,
    ) -> None:
        super().__init__(async_openai_client, max_rollouts=max_rollouts, **more)
        self.agent_match = agent_match
        self.reflection_model = reflection_model
        self.minibatch_size = minibatch_size
        self.max_iterations = max_iterations
        self.max_merges = max_merges
        self.perfect_reward = perfect_reward
        self.reflect_prompt = Path(reflect_prompt)
        self.merge_prompt = Path(merge_prompt)

    def _options(self) -> dict[str, Any]:
        chosen = {name: getattr(self, name) for name in ("reflection_model", "minibatch_size", "max_merges", "perfect_reward")}
        files = {name: getattr(self, name).read_text() for name in ("reflect_prompt", "merge_prompt")}
        return {**super()._options(), **chosen, **files}

    async def _search(self, seed: Candidate, train: Sequence[Any], val: Sequence[Any]) -> str:
        """Mutate in each iteration, or merge in the one after a mutation that joined the pool, if two of the front can be merged."""
        self._pool: dict[str, Candidate] = {}
        self._scores: dict[str, list[float]] = {}
        self._merged_pairs: set[tuple[str, str]] = set()
        self._val = val
        batches = batch_iter_over_dataset(train, self.minibatch_size, self._source("train"))
        await self._join(seed)
        await self._record_step(0, iteration=0, kind="seed", joined=seed.version, front=self._front())
        merge_is_due = False
        for number in range(1, self.max_iterations + 1):
            pair = self._pair(number) if merge_is_due else None
            try:
                joined = await (self._mutate(number, next(batches)) if pair is None else self._merge(number, *pair))
            except EditorError:
                joined = None
            merge_is_due = pair is None and joined is not None
            kind = "mutation" if pair is None else "merge"
            await self._record_step(number, iteration=number, kind=kind, joined=joined.version if joined else None, front=self._front())
        return "all iterations are done"

    def _parents(self) -> dict[str, tuple[str, ...]]:
        return {version: candidate.parents for version, candidate in self._pool.items()}

    def _front(self) -> dict[str, int]:
        return {version: len(won) for version, won in pareto.front(self._scores).items()}

    async def _join(self, candidate: Candidate) -> Candidate:
        """Score the candidate on all validation tasks and add it to the pool."""
        evaluation = await self.evaluator.evaluate("whole validation", candidate, self._val, "val")
        self._pool[candidate.version] = candidate
        self._scores[candidate.version] = evaluation.per_task
        self._update_best(candidate, evaluation)
        return candidate

    # --- mutation

    async def _mutate(self, number: int, tasks: Sequence[Any]) -> Candidate | None:
        """Mutate a candidate of the front; return the child if it scores better on `tasks` than its parent, else None."""
        step = f"iteration {number}"
        parent = self._pool[pareto.choose(self._scores, self._source(step))]
        names = self._edited(parent)
        name = names[number % len(names)]
        before = await self.evaluator.evaluate(f"{step}/before", parent, tasks, "train")
        if self.perfect_reward is not None and min(before.per_task) >= self.perfect_reward:
            return None
        child = self._child(parent, name, await self._reflect(step, name, parent.templates[name], before, tasks))
        if child is None or child.templates == parent.templates:
            return None
        after = await self.evaluator.evaluate(f"{step}/after", child, tasks, "train")
        return await self._join(child) if after.score > before.score else None

    async def _reflect(self, step: str, name: str, prompt: str, evaluation: Evaluation, tasks: Sequence[Any]) -> str:
        places = [place for place, status in enumerate(evaluation.statuses) if status is not None]

        async def reflection_prompt() -> str:
            samples = await self.evaluator.samples(evaluation, tasks, places, agents=self._agents(name))
            return render(self.reflect_prompt, {"prompt": prompt, "samples": samples})

        return await self.editor.ask(f"{step}/reflect", self.reflection_model, [prompt, evaluation.rollout_ids], reflection_prompt)

    # --- merge

    def _pair(self, number: int) -> tuple[Candidate, Candidate] | None:
        """Choose two candidates of the front to merge, the better one first; None where all are merged or `max_merges` is reached."""
        pairs = [pair for pair in pareto.pairs_to_merge(self._scores, self._parents()) if pair not in self._merged_pairs]
        if len(self._merged_pairs) >= self.max_merges or not pairs:
            return None
        chosen = self._source(f"iteration {number}/pair").choice(pairs)
        self._merged_pairs.add(chosen)
        left, right = sorted(chosen, key=lambda version: -pareto.mean(self._scores[version]))
        return self._pool[left], self._pool[right]

    async def _merge(self, number: int, better: Candidate, other: Candidate) -> Candidate | None:
        """Merge two candidates; the child joins the pool if no worse than either on a sample of tasks at which one of the two is best."""
        step = f"iteration {number}"
        child = await self._merged(step, better, other)
        if child is None or any(child.templates == known.templates for known in self._pool.values()):
            return None
        won = pareto.front(self._scores)
        contested = sorted(won[better.version] ^ won[other.version])
        places = self._source(f"{step}/tasks").sample(contested, min(len(contested), self.minibatch_size))
        done = await self.evaluator.evaluate(f"{step}/merge", child, [self._val[place] for place in places], "val")
        parent_scores = [pareto.mean([self._scores[each.version][place] for place in places]) for each in (better, other)]
        return await self._join(child) if done.score >= max(parent_scores) else None

    async def _merged(self, step: str, better: Candidate, other: Candidate) -> Candidate | None:
        if len(names := self._edited(better)) > 1:
            shared = pareto.common_ancestor(better.version, other.version, self._parents(), self._scores)
            if shared is None:
                return None
            texts = pareto.merged(self._pool[shared].templates, better.templates, other.templates, left_is_better=True)
            return self._new_candidate(texts, better, other)
        (name,) = names
        first, second = better.templates[name], other.templates[name]

        async def merge_prompt() -> str:
            wins = (self._wins(better, other), self._wins(other, better))
            return render(self.merge_prompt, {"prompt": first, "other": second, "first_wins": wins[0], "other_wins": wins[1]})

        answer = await self.editor.ask(f"{step}/merge", self.reflection_model, [first, second], merge_prompt)
        return self._child(better, name, answer, other)

    def _wins(self, one: Candidate, over: Candidate) -> str:
        ours, theirs = self._scores[one.version], self._scores[over.version]
        places = [place for place in range(len(ours)) if ours[place] > theirs[place]]
        return "\n".join(f"Task: {self._val[place]}" for place in places[:SHOWN_WINS]) or "(none)"
