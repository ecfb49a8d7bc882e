"""The files of one cycle of `agl-otel improve`, what a promotion asks of them, and the figures that are recorded of them.

cycles/0001/window.json, update.json, gate.json, canary.json, verdict.json    what each stage has found
cycles/0001/canary_begun.json    how far a canary is (improve_canary.py)
cycles/0001/recorded.json        the store knows the cycle
cycles/0001/run                  the training run, or the search
cycles/0001/model                the weights that it made
cycles/0001/tasks.json, prompts.json    the tasks that a search for prompts is made on, and the prompts that it made
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.checked_files import digest_of, file_digest, read_checked, with_checksum, write_json
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.errors import DataError

PROMPTS: Final = "prompts.json"
STAGES: Final = ("window", "update", "gate", "canary", "verdict")
FOUND: Final = STAGES[:-1]
"""Those on which a verdict rests."""
_OF_CANARY: Final = ("share", "begun", "rated", "mean", "promoted_mean", "promoted_rated", "mixed", "version")


class CycleFolder:
    """One cycle."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.folder = folder / "cycles" / f"{number:04d}"

    @property
    def model(self) -> Path:
        """The weights that it made, if it trains."""
        return self.folder / "model"

    @property
    def prompts(self) -> Path:
        """The prompts that it made, if it searches for them."""
        return self.folder / PROMPTS

    @property
    def made(self) -> Path:
        """What it made: weights or prompts."""
        return self.prompts if self.prompts.exists() else self.model

    @property
    def run(self) -> Path:
        """The folder of its training run, or search."""
        return self.folder / "run"

    def read(self, stage: str) -> dict[str, Any] | None:
        """Return what a stage has found; None if it has not ended. Raises DataError for a damaged file."""
        path = self.folder / f"{stage}.json"
        return read_checked(path) if path.exists() else None

    def of(self, stage: str) -> dict[str, Any]:
        """Return what a stage that has ended has found. Raises DataError if its file is gone, or damaged."""
        if (found := self.read(stage)) is None:
            raise DataError(f"{self.folder / stage}.json is missing: restore it, or remove the folder, and the cycle begins again")
        return found

    def write(self, stage: str, facts: dict[str, Any]) -> None:
        """End a stage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{stage}.json", with_checksum(facts))

    def digests(self) -> dict[str, str]:
        """Return {stage: digest of its file} of the stages of FOUND that have ended."""
        found = {stage: self.read(stage) for stage in FOUND}
        return {stage: digest_of(facts) for stage, facts in found.items() if facts is not None}

    def check_made(self) -> None:
        """Raise DataError where the weights or prompts are not those that the update made."""
        made = self.made
        now = file_digest(made) if made.is_file() else model_fingerprint(made) if made.exists() else ""
        if self.of("update")["weights"] != now:
            raise DataError(f"the {'prompts' if made.is_file() else 'weights'} in {made} are not those that the cycle made: restore them")

    def check_promotion(self) -> None:
        """Raise DataError where what it made may not be served: evidence that is not what the verdict was given on, or something else."""
        held, now = self.of("verdict")["evidence"], self.digests()
        if changed := [f"{stage}.json" for stage in FOUND if stage not in held or held[stage] != now.get(stage)]:
            raise DataError(f"{', '.join(changed)} in {self.folder} is not what its promotion rests on: restore it")
        if against := [*self.of("gate")["why"], *filter(None, [self.of("canary")["why"]])]:
            raise DataError(f"verdict.json in {self.folder} says promoted, and {', '.join(against)} speaks against it: restore it")
        self.check_made()

    def metrics(self) -> dict[str, Any]:
        """Return the figures of a cycle with a verdict, flat; of its canary the last step's."""
        verdict = self.of("verdict")
        found = {name: figure for stage in FOUND if (facts := self.read(stage)) for name, figure in figures_of(stage, facts).items()}
        steps = (self.read("canary") or {"steps": []})["steps"]
        found |= {"canary_steps": len(steps)} if steps else {}
        return {**found, "verdict": verdict["verdict"], "why": ", ".join(verdict["why"])}


def figures_of(stage: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of what a stage has found, flat; of a canary those of its last step."""
    return _FIGURES[stage](facts)


def step_figures(step: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a step of a canary (improve_canary.judged_step), flat."""
    return {f"canary_{name}": step[name] for name in _OF_CANARY if step[name] is not None}


def _of_window(facts: dict[str, Any]) -> dict[str, Any]:
    found = {
        "selection": facts["selection"],
        "attempts": len(facts["rollout_ids"]),
        "unrated": facts["unrated"],
        "version": facts["version"],
    }
    return found | {name: count for name, count in facts["too_old"].items() if count}


def _of_update(facts: dict[str, Any]) -> dict[str, Any]:
    return {"training_run": facts["run"]} | ({"error": facts["error"]} if facts.get("error") else {})


def _of_gate(facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"why": ", ".join(facts["why"])}
    if "held_out" in facts:
        found |= {f"held_out_{name}": value for name, value in facts["held_out"].items()}
        found |= {"drift": facts["drift"]} if facts["drift"] is not None else {}
        for name in ("backtest", "trusted"):
            if (estimate := facts[name]) is not None:
                gain = estimate["gain"]
                found |= {f"{name}_gain": gain["value"], f"{name}_low": gain["low"], f"{name}_high": gain["high"]}
                found |= {f"{name}_verdict": estimate["verdict"], f"{name}_attempts": estimate["attempts"]}
    return found


def _of_canary(facts: dict[str, Any]) -> dict[str, Any]:
    return {"why": facts["why"], **(step_figures(facts["steps"][-1]) if facts["steps"] else {})}


_FIGURES: Final = {"window": _of_window, "update": _of_update, "gate": _of_gate, "canary": _of_canary}
