"""RandomSearch: evaluate prompts of a list in random order and keep the best one. Needs no editor; for smoke tests and as a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from agl_otel.algorithms.fast import FastAlgorithm
from agl_otel.algorithms.options import checked
from agl_otel.algorithms.prompts.candidates import Candidate
from agl_otel.algorithms.prompts.search import PromptSearch
from agl_otel.errors import UsageError


@checked
class RandomSearch(PromptSearch, FastAlgorithm):
    """Samples combinations of templates and scores each on the validation set, or on the training set if there is none.

    Args:
        choices: templates for the first prompt of the initial resources, or {name of a prompt: templates}.
        n_trials: number of combinations to try, besides that of the initial resources; None: all.
        more: PromptSearch's options.
    """

    name = "random_search"

    def __init__(
        self,
        choices: Annotated[
            Sequence[str] | Mapping[str, Sequence[str]],
            Field(min_length=1, description="they are what is tried: a list of templates, or a table of such lists by the prompt's name"),
        ],
        *,
        n_trials: Annotated[int | None, Field(ge=1, description="a search without a trial finds nothing")] = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.choices = choices
        self.n_trials = n_trials

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "choices": self.choices}

    def _check(self, train: Sequence[Any], val: Sequence[Any], adapter: Any) -> None:
        if not (train or val):
            raise ValueError("RandomSearch needs tasks to try prompts on: give train_dataset or val_dataset")

    async def _search(self, seed: Candidate, train: Sequence[Any], val: Sequence[Any]) -> str:
        """Evaluate the initial prompts, then combinations in random order."""
        found = combinations(self.choices, seed.templates)
        order = self._source("order").sample(range(len(found)), len(found))[: self.n_trials]
        for number, candidate in enumerate([seed, *(self._new_candidate(found[place], seed) for place in order)]):
            evaluation = await self.evaluator.evaluate("trial", candidate, val or train, "val")
            self._update_best(candidate, evaluation)
            await self._record_step(number, trial=number, **candidate.described(), score=evaluation.score)
        return "all trials are done"


def combinations(choices: Sequence[str] | Mapping[str, Sequence[str]], begin: Mapping[str, str]) -> list[dict[str, str]]:
    """List all combinations of templates except the initial one. Raises UsageError for an unknown prompt."""
    named: Mapping[str, Sequence[str]] = choices if isinstance(choices, Mapping) else {next(iter(begin)): choices}
    if unknown := sorted(set(named) - set(begin)):
        raise UsageError(f"RandomSearch has choices for {', '.join(unknown)}: the initial resources' prompts are {', '.join(begin)}")
    found = [dict(begin)]
    for name, templates in named.items():
        found = [{**each, name: template} for each in found for template in dict.fromkeys([begin[name], *templates])]
    return found[1:]
