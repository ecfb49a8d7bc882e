"""Where the folder of a run keeps what it made: weights after a step, or the best prompts. Reads only; no torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from agl_otel.algorithms.checked_files import DIGESTS
from agl_otel.algorithms.run_folder import BEST, RUN, read_run
from agl_otel.algorithms.validation import best_of, validations
from agl_otel.algorithms.verl.checkpoints import STEP
from agl_otel.errors import UsageError

DONE: Final = {"grpo": "checkpoints/step-*/state.json", "sft": f"weights/*/{DIGESTS}", "verl": f"verl/checkpoints/{STEP}*/{DIGESTS}"}
"""{algorithm: the files that are written last into the folders of its weights, whose names end with the step}."""


@dataclass(frozen=True)
class RunResult:
    """What a run made."""

    run: Path
    path: Path
    """The folder with the weights; of a search for prompts the file with the best ones."""
    which: Literal["best", "last", "chosen"]
    """best: of the best validation; last: of the last step that is kept; chosen: of a step that was asked for."""
    step: int | None
    """After which the weights are; None: of prompts."""
    best_missing: str | None = None
    """Where the weights of the best validation were, where these are gone and `path` has the last ones instead."""
    not_above: tuple[float, float] | None = None
    """Of the best weights their score, and that of the weights that the run began with, where it is no higher."""

    @property
    def export(self) -> str | None:
        """The command that writes the weights as a model's folder; None for prompts."""
        return None if self.step is None else shlex.join(["agl-otel", "runs", "export", str(self.run), "DIR"])

    @property
    def named(self) -> str:
        """The kind of result, in words."""
        return "best prompts" if self.step is None else f"{self.which} weights, after step {self.step}"

    def lines(self) -> list[str]:
        """Return lines for the end of a run: where the result is, and how to use it."""
        use = f"to use them with vLLM or transformers: {self.export}" if self.export else None
        gone = [instead_of_best(self.best_missing)] if self.best_missing is not None else []
        score, before = self.not_above or (0.0, 0.0)
        vain = f"the training has not raised the score: {score:.3f} with its best weights, {before:.3f} with those that it began with"
        return [*([vain] if self.not_above else []), *gone, f"{self.named}: {self.path}", *([use] if use else [])]

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {"path": str(self.path), "which": self.which, "step": self.step, "export": self.export}


def instead_of_best(missing: str) -> str:
    """Return what a user should know where the weights of the best validation are gone from where they were."""
    return (
        f"the weights of the run's best validation are gone, {missing} is not there: these are the last ones. Restore it, or name others "
        "by their step"
    )


def kept_weights(run: Path) -> dict[int, Path]:
    """Return {step: folder} of the weights that a run's folder keeps whole, by step. Raises DataError for a damaged run.json."""
    pattern = DONE.get(str(read_run(run / RUN)["algorithm"])) if (run / RUN).exists() else None
    folders = [path.parent for path in run.glob(pattern)] if pattern else []
    steps = {int("".join(filter(str.isdigit, folder.name))): folder for folder in folders}
    return {step: steps[step] for step in sorted(steps) if step > 0}


def result_of(run: Path, *, step: int | None = None, last: bool = False) -> RunResult:
    """Find the result of the run in a folder: the weights of its best validation, where there is one, or the last ones; or the prompts.
    Where the best ones are gone, `best_missing` names them.

    `step`: that one's weights; `last`: the last ones. Raises UsageError where there is none, DataError for damaged files.
    """
    if not (run / RUN).exists():
        raise UsageError(f"{run} is not the folder of a run, it holds no {RUN}: name the one that `agl-otel train` named at its start")
    run = run.resolve()
    kept = kept_weights(run)
    if step is not None:
        if step not in kept:
            has = f"it keeps those after {', '.join(map(str, kept))}" if kept else "it keeps none"
            raise UsageError(
                f"the run in {run} has no weights after step {step}: {has}; keep_checkpoints sets how many a run of grpo keeps"
            )
        return RunResult(run, kept[step], "chosen", step)
    found = validations(run)
    best, before = best_of(found), next((each.score for each in found if each.step == 0), None)
    wanted = run / best.weights if best is not None and best.weights is not None and not last else None
    if best is not None and wanted is not None and wanted.is_dir():
        vain = None if before is None or best.score > before else (best.score, before)
        return RunResult(run, wanted, "best", best.step, not_above=vain)
    if kept:
        return RunResult(run, kept[max(kept)], "last", max(kept), str(wanted) if wanted is not None else None)
    if (run / BEST).exists():
        return RunResult(run, run / BEST, "best", None)
    raise UsageError(f"the run in {run} keeps nothing yet: wait for its first checkpoint, or start it again so that it goes on")


def result_if_any(run: Path) -> RunResult | None:
    """Find the result of a run; None where it has none, or the folder is none of a run. Raises DataError for damaged files."""
    try:
        return result_of(run)
    except UsageError:
        return None
