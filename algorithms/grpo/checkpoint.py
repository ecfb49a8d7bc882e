"""Checkpoints of a training run: weights, optimizer, random states and progress, in a folder for each step.

    checkpoints/step-000012/
        model.safetensors   the weights, as a model server reads them; with LoRA instead
        adapter/            the adapter in PEFT's format
        trainer.pt          the optimizer's state and torch's random states
        state.json          everything else, with LoRA also what names the base model, the digests of the files above, and a checksum

A checkpoint is written to a temporary folder, flushed to disk and renamed, so that it is complete or absent. Weights that a push has
written already are linked. Stores do not belong here.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Generator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from agl_otel.algorithms.checked_files import file_digest, remove_whole, with_checksum, without_checksum, write_json
from agl_otel.algorithms.grpo.lora import adapter, adapter_config, has_lora, load_adapter, write_adapter
from agl_otel.algorithms.grpo.policy import load_weights, weights_of, write_weights
from agl_otel.algorithms.model_files import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILE, WEIGHTS_FILE
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.algorithms.validation import best_weights
from agl_otel.errors import FULL_DISK, DataError, DiskFullError, SettingsError, UsageError
from agl_otel.service.framed import sync_file, sync_folder
from agl_otel.service.private import open_file
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
    base: dict[str, str] | None = None
    """Names the model that an adapter belongs to (base_model.name_of_base); None: the checkpoint holds all weights."""
    format: int = FORMAT


@dataclass(frozen=True)
class _Snapshot:
    """What a checkpoint holds, in memory that training does not change."""

    state: dict[str, Any]
    """The content of state.json, without digests."""
    trainer: dict[str, Any]
    weights: Mapping[str, torch.Tensor] | None
    """None: the file is linked already, or there is an adapter."""
    adapter: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]] | None
    """An adapter's weights and its configuration, without those of its base model, which training does not change."""


class Checkpoints:
    """The checkpoints of one run, of which the `keep` latest are kept, and that with the best validation.

    Args:
        run_folder: the run's folder.
        keep: how many.
        writer: a thread that writes the files while training goes on; None: `save` writes them itself.
        base: names the base model of a LoRA run (base_model.name_of_base); None: all weights are trained.
    """

    def __init__(self, run_folder: Path, *, keep: int, writer: Executor | None = None, base: Mapping[str, str] | None = None) -> None:
        self.folder = run_folder / FOLDER
        self._run_folder = run_folder
        self._keep = keep
        self._writer = writer
        self._base = dict(base) if base is not None else None
        self._writing: Future[None] | None = None

    def latest(self) -> Path | None:
        """Return the folder of the latest checkpoint; None where there is none."""
        return (self._all() or [None])[-1]

    def _all(self) -> list[Path]:
        """List the folders by step; from a million on their names are longer."""
        return sorted(self.folder.glob("step-*"), key=lambda place: (len(place.name), place.name))

    def remove_incomplete(self) -> None:
        """Remove what a killed process left of a checkpoint."""
        for incomplete in self.folder.glob(".step-*"):
            shutil.rmtree(incomplete)

    def of_step(self, step: int) -> Path:
        """Return the folder of the checkpoint after this step."""
        return self.folder / f"step-{step:06d}"

    def save(self, state: State, model: Any, optimizer: torch.optim.Optimizer, *, pushed: Path | None = None) -> Path:
        """Copy everything to the CPU's memory and begin to write it, durably, to the folder that is returned; `wait` ends with it written.

        Waits for the checkpoint before it. `pushed`: a folder that holds the same weights in the same precision, whose file is then linked
        instead of written again. Raises what `wait` raises.
        """
        self.wait()
        place = self.of_step(state.step)
        beside = place.with_name(f".{place.name}")
        held = adapter(model)
        with _writing_to(place):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            linked = held is None and pushed is not None and _linked(pushed / WEIGHTS_FILE, beside / WEIGHTS_FILE)
        snapshot = _Snapshot(
            {**asdict(state), "python": _listed(random.getstate()), "numpy": _numpy_state(), "base": self._base},
            _copied({"optimizer": optimizer.state_dict(), **_torch_random()}),
            weights_of(model) if held is None and not linked else None,
            (_copied(held), adapter_config(model)) if held is not None else None,
        )
        if self._writer is None:
            self._write(snapshot, place, beside)
        else:
            self._writing = self._writer.submit(self._write, snapshot, place, beside)
        return place

    def wait(self) -> None:
        """Wait until the checkpoint is complete that is being written, if any.

        Raises DiskFullError or SettingsError where it could not be written; earlier ones are still there.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def raise_failed(self) -> None:
        """Raise what `wait` would, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _write(self, snapshot: _Snapshot, place: Path, beside: Path) -> None:
        """Write the checkpoint to `beside`, rename it to `place`, and remove older ones beyond `keep`."""
        names = [TRAINER_FILE]
        with _writing_to(place):
            if snapshot.weights is not None:
                write_weights(snapshot.weights, beside)
            _save(snapshot.trainer, beside / TRAINER_FILE)
            if snapshot.adapter is not None:
                write_adapter(*snapshot.adapter, beside / ADAPTER)
                names += [f"{ADAPTER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_FILE)]
                sync_folder(beside / ADAPTER)
            else:
                names.append(WEIGHTS_FILE)
            for name in names:
                sync_file(beside / name)
            files = {name: file_digest(beside / name) for name in names}  # of files that are still in the system's cache
            write_json(beside / STATE_FILE, with_checksum({**snapshot.state, "files": files}))
            shutil.rmtree(place, ignore_errors=True)
            beside.replace(place)
            sync_folder(self.folder)
            best = best_weights(self._run_folder)
            for old in self._all()[: -self._keep]:
                if old != best:
                    remove_whole(old)

    def load(self, place: Path, run_id: str, model: Any, optimizer: torch.optim.Optimizer) -> State:
        """Restore weights, optimizer and random states from the checkpoint in `place`.

        Raises DataError for a damaged checkpoint, UsageError for one of another run or model; both name it and the remedy.
        """
        state = self.state(place, run_id)
        held = torch.load(place / TRAINER_FILE, map_location="cpu", weights_only=True)
        try:
            if has_lora(model):
                theirs, ours = ((base or {}).get("digest") for base in (state.base, self._base))
                if theirs != ours:
                    raise UsageError(f"its adapter was trained on one of digest {theirs}, and the run's has {ours}")
                held_adapter = place / ADAPTER / ADAPTER_FILE
                load_adapter(model, load_file(held_adapter) if held_adapter.exists() else {}, str(place))
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
        others = [path.name for path in self._all() if path != place]
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


def last_checkpoint(run: RunFolder) -> tuple[Path | None, State | None]:
    """Return the folder of a run's last checkpoint, and its state; None without one.

    Raises DataError for a damaged checkpoint, UsageError for one of another run.
    """
    checkpoints = Checkpoints(run.folder, keep=1)
    place = checkpoints.latest()
    return place, checkpoints.state(place, run.run_id) if place is not None else None


@contextmanager
def _writing_to(place: Path) -> Generator[None]:
    """Turn the errors of three libraries on a file that cannot be written into one that names the checkpoint and the remedy."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, DiskFullError) as error:  # torch raises RuntimeError
        shutil.rmtree(place.with_name(f".{place.name}"), ignore_errors=True)
        cause = error.__cause__ if isinstance(error, DiskFullError) else error  # of a file in the temporary folder
        if isinstance(cause, OSError) and cause.errno in FULL_DISK:
            file = f"{TRAINER_FILE} of " if Path(cause.filename or "").name == TRAINER_FILE else ""
            raise DiskFullError.of(f"{file}the checkpoint {place}", cause.strerror) from error
        raise SettingsError(
            f"the checkpoint {place} cannot be written ({error_text(error)}): check the disk's free space and the folder's permissions, "
            "then start the run again; it resumes after the checkpoint before"
        ) from error


def _save(value: Mapping[str, Any], path: Path) -> None:
    """Write with torch, through a file of Python's: torch's own RuntimeError lacks the cause. Raises OSError, which names `path`."""
    try:
        with open_file(path, "wb") as file:
            torch.save(value, file)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch's writer goes on after a failed write, and fails then
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def _linked(file: Path, link: Path) -> bool:
    """Make a hard link; return whether the file system has made it."""
    try:
        os.link(file, link)
    except OSError:  # the file is not there, or on another file system, or this one has no links
        return False
    return True


def _copied(value: Any) -> Any:
    """Return a copy of nested values whose tensors are in memory of their own, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]  # of an optimizer
    return [_copied(each) for each in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


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
