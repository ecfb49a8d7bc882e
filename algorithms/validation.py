"""The validations of a run: scores by step, and the weights with the best one, in validation.json of the run's folder.

A run log shows each in the metric sinks, as a step with `figures_of` alone (run_log.py). The file is replaced as a whole, and weights that
it names as the best are not removed with older ones, so it always names some that exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.checked_files import read_checked, with_checksum, write_json
from agl_otel.types.scores import Score

VALIDATION: Final = "validation.json"
VAL_REWARD: Final = "val_reward"
"""The score of a validation, by the step whose weights it is of."""


def figures_of(score: Score) -> dict[str, float]:
    """Return the metrics of a validation, under the same names for all trainers."""
    return {VAL_REWARD: score.mean, "val_rollouts": score.asked, "val_without_reward": score.missing}


def is_validation(metrics: Mapping[str, Any]) -> bool:
    """Return whether these are the metrics of a validation alone, not also of a step."""
    return VAL_REWARD in metrics and "reward_mean" not in metrics


@dataclass(frozen=True)
class Validation:
    """The score of a run's weights after a step."""

    step: int
    """0: before the training."""
    name: str
    """Of the evaluation in the run; its rollouts' ids contain it."""
    score: float
    tasks: int
    without_reward: int
    """Tasks without a reward, which count as 0."""
    weights: str | None
    """Where the weights are kept, relative to the run's folder; None: they are those that the run began with."""

    @property
    def scored(self) -> Score:
        """The score with its numbers of tasks."""
        return Score(self.score * self.tasks, self.tasks, self.without_reward)

    @property
    def scored_weights(self) -> ScoredWeights:
        """Score, step and weights alone."""
        return ScoredWeights(self.step, self.score, self.weights)


@dataclass(frozen=True)
class ScoredWeights:
    """The score of the weights after a step."""

    step: int
    score: float
    weights: str | None
    """Where they are kept, relative to the run's folder; None: unknown, or not kept."""

    def described(self, before: float | None = None) -> str:
        """Return score, step and weights, and that the score is not above the one `before` the training, if it is not."""
        gained = before is None or self.score > before
        return (
            f"{self.score:.3f} after step {self.step}"
            + (f" ({self.weights})" if self.weights else "")
            + ("" if gained else f"; not above the {before:.3f} before the training")
        )


def validations(folder: Path) -> list[Validation]:
    """Read the validations of the run in `folder`, by step. Raises DataError where the file is damaged."""
    path = folder / VALIDATION
    return [Validation(**row) for row in read_checked(path)["validations"]] if path.exists() else []


def note_validation(folder: Path, done: Validation) -> None:
    """Record a validation, in place of an earlier one of the same step."""
    others = [each for each in validations(folder) if each.step != done.step]
    found = sorted([*others, done], key=lambda each: each.step)
    write_json(folder / VALIDATION, with_checksum({"validations": [asdict(each) for each in found]}))


def best_of(found: Sequence[Validation]) -> Validation | None:
    """Return the best validation of weights that the run made, the earliest of equal ones; None where there is none."""
    return max((each for each in found if each.weights is not None), key=lambda each: (each.score, -each.step), default=None)


def best_weights(folder: Path) -> Path | None:
    """Return where the run keeps its best weights; None where none were validated."""
    best = best_of(validations(folder))
    return folder / best.weights if best is not None and best.weights is not None else None
