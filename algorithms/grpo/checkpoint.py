"""Checkpoints of a training run: weights, optimizer, random states and progress, in a folder for each step.

    checkpoints/step-000012/
        model.safetensors   the weights, as a model server reads them
        trainer.pt          the optimizer's state, torch's random states, and a LoRA adapter
        state.json          everything else, the digests of the two files above, and a checksum of itself

A checkpoint is written to a temporary folder, flushed to disk and renamed, so that it is complete or absent. Stores do not belong here.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from agl_otel.algorithms.grpo.lora import adapter, has_lora, load_adapter
from agl_otel.algorithms.grpo.policy import WEIGHTS_FILE, load_weights, save_weights
from agl_otel.algorithms.run_folder import file_digest, sync_file, sync_folder, with_checksum, without_checksum, write_json
from agl_otel.algorithms.validation import best_weights
from agl_otel.errors import DataError, UsageError
from agl_otel.text import error_text

FOLDER: Final = "checkpoints"
TRAINER_FILE: Final = "trainer.pt"
STATE_FILE: Final = "state.json"
FORMAT: Final = 1


@dataclass(frozen=True)
class State:
    """The progress of a run after a step, as JSON."""

    run_id: str
    step: int
    resources_id: str
    version: int
    """Of the resources and the weights."""
    tasks: dict[str, Any]
    """TaskOrder.state."""
    next_group: int
    shuffle: list[Any] = field(default_factory=list[Any])
    """random.Random.getstate of the source that permutes rewards (Rollouts.shuffle_rewards)."""
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Groups in flight: {"number", "step", "rollout_ids"}."""
    python: list[Any] = field(default_factory=list[Any])
    """random.getstate."""
    numpy: list[Any] = field(default_factory=list[Any])
    """numpy.random.get_state."""
    format: int = FORMAT


class Checkpoints:
    """The checkpoints of one run, of which the `keep` latest are kept, and that with the best validation."""

    def __init__(self, run_folder: Path, *, keep: int) -> None:
        self.folder = run_folder / FOLDER
        self._run_folder = run_folder
        self._keep = keep

    def latest(self) -> Path | None:
        """Return the folder of the latest checkpoint; None where there is none. Incomplete ones of killed processes are removed."""
        for incomplete in self.folder.glob(".step-*"):
            shutil.rmtree(incomplete)
        return max(self.folder.glob("step-*"), default=None)

    def of_step(self, step: int) -> Path:
        """Return the folder of the checkpoint after this step."""
        return self.folder / f"step-{step:06d}"

    def save(self, state: State, model: Any, optimizer: torch.optim.Optimizer) -> Path:
        """Write a checkpoint durably, remove older ones beyond `keep`, and return its folder."""
        place = self.of_step(state.step)
        beside = place.with_name(f".{place.name}")
        shutil.rmtree(beside, ignore_errors=True)
        save_weights(model, beside)
        torch.save({"optimizer": optimizer.state_dict(), "adapter": adapter(model), **_torch_random()}, beside / TRAINER_FILE)
        for name in (WEIGHTS_FILE, TRAINER_FILE):
            sync_file(beside / name)
        files = {name: file_digest(beside / name) for name in (WEIGHTS_FILE, TRAINER_FILE)}
        content = {**asdict(state), "python": _listed(random.getstate()), "numpy": _numpy_state(), "files": files}
        write_json(beside / STATE_FILE, with_checksum(content))
        shutil.rmtree(place, ignore_errors=True)
        beside.replace(place)
        sync_folder(self.folder)
        best = best_weights(self._run_folder)
        for old in sorted(self.folder.glob("step-*"))[: -self._keep]:
            if old != best:
                shutil.rmtree(old)
        return place

    def load(self, place: Path, run_id: str, model: Any, optimizer: torch.optim.Optimizer) -> State:
        """Restore weights, optimizer and random states from the checkpoint in `place`.

        Raises DataError for a damaged checkpoint, UsageError for one of another run or model; both name it and the remedy.
        """
        state = self.state(place, run_id)
        held = torch.load(place / TRAINER_FILE, map_location="cpu", weights_only=True)
        try:
            if has_lora(model):  # the base weights are still those of the model folder
                load_adapter(model, held.get("adapter") or {}, str(place))
            else:
                load_weights(model, place)
        except UsageError as error:
            raise UsageError(f"the checkpoint {place} is of another model: {error}. Give the run its own model, or a new folder") from error
        optimizer.load_state_dict(held["optimizer"])
        torch.set_rng_state(held["torch"])
        if held["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(held["cuda"])
        random.setstate(as_random_state(state.python))
        np.random.set_state((state.numpy[0], np.array(state.numpy[1], np.uint32), *state.numpy[2:]))
        return state

    def state(self, place: Path, run_id: str) -> State:
        """Read the run's progress. Raises DataError for a damaged checkpoint, UsageError for one of another run."""
        others = sorted(path.name for path in self.folder.glob("step-*") if path != place)
        remedy = f"remove it to resume from {others[-1]}" if others else "remove it to start the run again"
        try:
            content = without_checksum((place / STATE_FILE).read_bytes())
            files: dict[str, str] = content.pop("files")
            if content["format"] != FORMAT:
                raise UsageError(
                    f"the checkpoint {place} has format {content['format']}, this release reads {FORMAT}: use the release it is of"
                )
            state = State(**content)
            changed = [name for name, digest in files.items() if file_digest(place / name) != digest]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise DataError(f"the checkpoint {place} is damaged ({error_text(error)}): {remedy}") from error
        if changed:
            raise DataError(f"the checkpoint {place} is damaged ({', '.join(changed)} has changed since it was written): {remedy}")
        if state.run_id != run_id:
            raise UsageError(f"the checkpoint {place} is of run {state.run_id}, and this is {run_id}: bring the run's own, or {remedy}")
        return state


def as_random_state(state: list[Any]) -> tuple[Any, ...]:
    """Convert a state from JSON for random.Random.setstate."""
    return (state[0], tuple(state[1]), state[2])


def _listed(state: tuple[Any, ...]) -> list[Any]:
    return [state[0], list(state[1]), state[2]]


def _numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), *rest]


def _torch_random() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
