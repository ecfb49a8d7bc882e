"""APO: automatic prompt optimisation by textual gradients and beam search, with the options of Agent Lightning 0.3.

After Automatic Prompt Optimization with "Gradient Descent" and Beam Search (Pryzant et al., arXiv:2305.03495): a model criticises a prompt
by its rollouts (the textual gradient), a model edits the prompt accordingly, and the prompts with the best validation scores are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from agl_otel.algorithms.options import checked
from agl_otel.algorithms.prompts.beam import best_of, parents_of
from agl_otel.algorithms.prompts.candidates import Candidate
from agl_otel.algorithms.prompts.editor import EditorError, SearchOverError
from agl_otel.algorithms.prompts.evaluate import Evaluation
from agl_otel.algorithms.prompts.poml import WORDING, render
from agl_otel.algorithms.prompts.search import BATCH_SECONDS, Agents, BatchTimeout, EditorTemperature, ModelName, PromptSearch
from agl_otel.algorithms.utils import batch_iter_over_dataset
from agl_otel.errors import UsageError

MAX_EDITS = 10_000  # of a round
T = TypeVar("T")
Files = Annotated[Sequence[str | Path], Field(min_length=1, description="each call of the editor uses one of them")]
GRADIENT_PROMPTS = tuple(WORDING / f"gradient_{name}.poml" for name in ("points", "trace", "review"))
EDIT_PROMPTS = tuple(WORDING / f"edit_{name}.poml" for name in ("rewrite", "one_point"))


@checked
class APO(PromptSearch, Generic[T]):
    """Improves one prompt template of the initial resources. Needs the adapter TraceToMessages and both data sets.

    Args:
        async_openai_client: client of the editor; see PromptSearch.
        gradient_model: model that criticises prompts.
        apply_edit_model: model that edits prompts.
        diversity_temperature: sampling temperature of both.
        gradient_batch_size: number of training tasks for one critique, and the limit on the rollouts that it is shown.
        val_batch_size: number of validation tasks on which the candidates of a round are compared.
        beam_width: number of candidates kept after a round.
        branch_factor: number of edits of each parent.
        beam_rounds: number of rounds.
        rollout_batch_timeout: seconds for a batch of rollouts.
        agent_match: show the editor the model calls of agents whose name matches this regular expression alone, as in {prompt: expression},
            which also names the prompt that is edited. None: the first prompt, every agent.
        run_initial_validation: score the initial prompt on the whole validation set; otherwise the first round's leader is the first best.
        gradient_prompts, edit_prompts: POML files; each call uses one at random. Default: GRADIENT_PROMPTS, EDIT_PROMPTS.
        more: PromptSearch's options.
    """

    name = "apo"

    def __init__(
        self,
        async_openai_client: Any = None,
        *,
        gradient_model: ModelName = "gpt-5-mini",
        apply_edit_model: ModelName = "gpt-4.1-mini",
        diversity_temperature: EditorTemperature = 1.0,
        gradient_batch_size: Annotated[int, Field(ge=1, le=100_000, description="a critique is of at least one rollout")] = 4,
        val_batch_size: Annotated[int, Field(ge=1, le=100_000, description="candidates are compared on at least one task")] = 16,
        beam_width: Annotated[int, Field(ge=1, le=1000, description="a round keeps at least one candidate")] = 4,
        branch_factor: Annotated[int, Field(ge=1, le=1000, description="a round edits each parent at least once")] = 4,
        beam_rounds: Annotated[int, Field(ge=1, le=10_000, description="a search without a round changes nothing")] = 3,
        rollout_batch_timeout: BatchTimeout = BATCH_SECONDS,
        agent_match: Agents = None,
        run_initial_validation: bool = True,
        gradient_prompts: Files = GRADIENT_PROMPTS,
        edit_prompts: Files = EDIT_PROMPTS,
        _poml_trace: bool = False,  # an option of 0.3, without effect here
        **more: Any,
    ) -> None:
        if (edits := beam_width * branch_factor) > MAX_EDITS:
            raise UsageError(
                f"beam_width = {beam_width} and branch_factor = {branch_factor} make {edits} edits a round: they must be at most "
                f"{MAX_EDITS}, because each takes two calls of the editor and a batch of rollouts; give smaller ones"
            )
        super().__init__(async_openai_client, temperature=diversity_temperature, rollout_batch_timeout=rollout_batch_timeout, **more)
        if isinstance(agent_match, Mapping) and len(agent_match) > 1:
            raise UsageError(f"agent_match names {', '.join(agent_match)}: APO edits one prompt; name one, or use GEPA")
        self.agent_match = agent_match
        self.gradient_model = gradient_model
        self.apply_edit_model = apply_edit_model
        self.gradient_batch_size = gradient_batch_size
        self.val_batch_size = val_batch_size
        self.beam_width = beam_width
        self.branch_factor = branch_factor
        self.beam_rounds = beam_rounds
        self.run_initial_validation = run_initial_validation
        self.gradient_prompts = [Path(path) for path in gradient_prompts]
        self.edit_prompts = [Path(path) for path in edit_prompts]

    def _options(self) -> dict[str, Any]:
        plain = ("gradient_model", "apply_edit_model", "gradient_batch_size", "val_batch_size", "beam_width", "branch_factor")
        chosen = {name: getattr(self, name) for name in (*plain, "run_initial_validation")}
        files = {name: [path.read_text() for path in getattr(self, name)] for name in ("gradient_prompts", "edit_prompts")}
        return {**super()._options(), **chosen, **files}

    async def _search(self, seed: Candidate, train: Sequence[Any], val: Sequence[Any]) -> str:
        """For each round, expand the beam, compare the candidates, keep the best, and score the leader on the whole validation set."""
        self._prompt_name = self._edited(seed)[0]
        self._scored: dict[str, Evaluation] = {}
        self._train = batch_iter_over_dataset(train, self.gradient_batch_size, self._source("train"))
        batches: Iterator[Sequence[Any]] = batch_iter_over_dataset(val, self.val_batch_size, self._source("val"))
        if self.run_initial_validation:
            self._update_best(seed, await self._validate(seed, val))
            await self._record_step(0, round=0, candidates=[{**seed.described(), "score": self.best_score}])
        beam = [seed]
        for number in range(1, self.beam_rounds + 1):
            made, stop = await self._expand(number, beam)
            beam = await self._select(number, [*beam, *made], next(batches))
            self._update_best(beam[0], await self._validate(beam[0], val))
            await self._record_step(number, round=number, made=len(made), candidates=self._ranking)
            if stop is not None:
                raise stop
        return "all rounds are done"

    # --- a round

    async def _expand(self, number: int, beam: Sequence[Candidate]) -> tuple[list[Candidate], SearchOverError | None]:
        """Edit each parent `branch_factor` times. Returns the new candidates, and the error where the search stopped before the end."""
        parents = parents_of(beam, self.beam_width, self._source(f"round {number}/parents"))
        branches = [(place, parent, branch) for place, parent in enumerate(parents) for branch in range(self.branch_factor)]
        made: list[Candidate] = []
        for place, parent, branch in branches:
            step = f"round {number}/parent {place}/branch {branch}"
            try:
                if (candidate := await self._branch(step, parent, next(self._train))) is not None:
                    made.append(candidate)
            except EditorError:
                continue
            except SearchOverError as stop:
                return made, stop
        return made, None

    async def _branch(self, step: str, parent: Candidate, tasks: Sequence[Any]) -> Candidate | None:
        """Run the parent, request a critique, and edit it; None where the edit is not a valid template.

        Where the critique fails or is empty, the candidate has the parent's text, as in Agent Lightning 0.3. Raises EditorError where the
        edit fails.
        """
        self.editor.check()
        evaluation = await self.evaluator.evaluate(f"{step}/train", parent, tasks, "train")
        source, prompt = self._source(step), parent.templates[self._prompt_name]
        finished = [place for place, status in enumerate(evaluation.statuses) if status is not None]
        places = source.sample(finished, min(self.gradient_batch_size, len(finished)))
        gradient_file, edit_file = source.choice(self.gradient_prompts), source.choice(self.edit_prompts)

        async def gradient_prompt() -> str:
            samples = await self.evaluator.samples(evaluation, tasks, places, agents=self._agents(self._prompt_name))
            return render(gradient_file, {"prompt": prompt, "samples": samples})

        shown = [gradient_file.name, prompt, [evaluation.rollout_ids[place] for place in places]]
        try:
            critique = await self.editor.ask(f"{step}/critique", self.gradient_model, shown, gradient_prompt)
        except EditorError:
            critique = ""
        if not critique:
            return self._new_candidate(parent.templates, parent)

        async def edit_prompt() -> str:
            return render(edit_file, {"prompt": prompt, "critique": critique})

        answer = await self.editor.ask(f"{step}/edit", self.apply_edit_model, [edit_file.name, prompt, critique], edit_prompt)
        return self._child(parent, self._prompt_name, answer)

    async def _select(self, number: int, candidates: Sequence[Candidate], tasks: Sequence[Any]) -> list[Candidate]:
        """Select the beam of the next round, best first. Candidates with equal texts are evaluated once."""
        texts = {candidate.templates[self._prompt_name]: candidate for candidate in reversed(candidates)}
        self.evaluator.require(len(texts) * len(tasks))
        step = f"round {number}/val"
        done = await asyncio.gather(*(self.evaluator.evaluate(step, candidate, tasks, "val") for candidate in texts.values()))
        score = {text: evaluation.score for text, evaluation in zip(texts, done, strict=True)}
        scores = [score[candidate.templates[self._prompt_name]] for candidate in candidates]
        self._ranking = [{**candidate.described(), "score": score} for candidate, score in best_of(candidates, scores, len(candidates))]
        return [candidate for candidate, _ in best_of(candidates, scores, self.beam_width)]

    async def _validate(self, candidate: Candidate, val: Sequence[Any]) -> Evaluation:
        """Evaluate the candidate on the whole validation set, once per text and run."""
        text = candidate.templates[self._prompt_name]
        if text not in self._scored:
            self._scored[text] = await self.evaluator.evaluate("whole validation", candidate, val, "val")
        return self._scored[text]
