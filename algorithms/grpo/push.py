"""What a push writes for the model server: weights with an adapter merged in, or the adapter alone, in a folder for each version."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from agl_otel.algorithms.base_model import check_base
from agl_otel.algorithms.grpo.checkpoint import last_checkpoint
from agl_otel.algorithms.grpo.lora import save_adapter
from agl_otel.algorithms.grpo.options import Updates
from agl_otel.algorithms.grpo.policy import release_memory, save_merged, save_weights
from agl_otel.algorithms.hub import origin_of
from agl_otel.algorithms.model_files import ADAPTER
from agl_otel.algorithms.run_folder import WEIGHTS, RunFolder
from agl_otel.errors import UsageError

KEPT_WEIGHTS: Final = 2  # the newest, which the server reads during a push, and the previous one for inspection


@dataclass(frozen=True)
class Pushes:
    """The files of a run's pushes.

    Args:
        folder: for the folders of the versions.
        updates: say what is trained, and in which precision.
        adapter_rank: the greatest rank of a LoRA adapter that the model server takes; 0: it takes merged weights only.
        of_run_alone: whether `folder` lies in the run's own, so that all versions in it are the run's.
    """

    folder: Path
    updates: Updates
    adapter_rank: int
    of_run_alone: bool = False
    _written: set[int] = field(default_factory=set[int])
    """The versions whose files this process wrote; others in `folder` may be of another run."""

    def of(self, version: int) -> Path:
        """Return the folder of a version."""
        return self.folder / str(version)

    def write(self, model: Any, version: int) -> Path:
        """Write what the server loads; return the folder."""
        shutil.rmtree(self.of(version), ignore_errors=True)  # of a run that was stopped
        if self.adapter_alone:
            return save_adapter(model, self.of(version))
        place = save_weights(model, self.of(version), dtype=_dtype_of_files(self.updates))
        self._written.add(version)
        return place

    def forget(self, version: int) -> None:
        """Remove what is no longer needed once the server has loaded `version`: all but the newest KEPT_WEIGHTS, and in a folder of the
        run alone also those beyond `version`, which a killed process pushed and a resumed run may never repeat."""
        kept = range(version - KEPT_WEIGHTS + 1, version + 1)
        known = [int(each.name) for each in self.folder.glob("*") if each.name.isdigit()] if self.of_run_alone else [kept.start - 1]
        for old in known:
            if old > 0 and old not in kept:
                shutil.rmtree(self.of(old), ignore_errors=True)

    @property
    def adapter_alone(self) -> bool:
        """Whether the server takes an adapter of this rank alone."""
        return _takes_adapter(self.updates, self.adapter_rank)

    def for_checkpoint(self, version: int) -> Path | None:
        """Return the folder of a version whose file is that of a checkpoint.

        None where checkpoints hold an adapter or more precision, or the server has read this version from elsewhere.
        """
        other = self.updates.lora_rank is not None or self.updates.in_bfloat16
        return None if other or version not in self._written else self.of(version)

    def resumed(self, checkpoint: Path, run: Path, version: int) -> Path:
        """Return the folder from which a model server that was started for a resumed run has read the weights of its checkpoint."""
        return _served_from(self.updates, checkpoint, run, version, adapter_rank=self.adapter_rank)


def weights_to_serve(updates: Updates, run: RunFolder, *, model_dir: Path, adapter_rank: int) -> tuple[Path | None, int]:
    """Return the folder (None: `model_dir`) and version of the weights with which a model server must start when `run` is resumed.

    Where the server does not take the adapter of the last checkpoint, it is merged into the model's weights, in the run's folder, as the
    trainer pushed them: on its device, by as many threads. Raises what Checkpoints.state raises, and UsageError where `model_dir` is not
    the model that the adapter belongs to.
    """
    place, state = last_checkpoint(run)
    if place is None or state is None:
        return None, 1
    folder = _served_from(updates, place, run.folder, state.version, adapter_rank=adapter_rank)
    if state.base is not None and not _takes_adapter(updates, adapter_rank):
        check_base(state.base, model_dir, remedy="give the run its own model, or a new folder")
        write = partial(save_merged, dtype=dtype_of_model(updates), device=updates.device, saved=_dtype_of_files(updates))
        shutil.rmtree(folder, ignore_errors=True)  # it may hold an adapter, pushed to a server that took it
        with ThreadPoolExecutor(1, "merge", torch.set_num_threads, (updates.threads,)) as worker:
            worker.submit(write, model_dir, place / ADAPTER, folder).result()
            worker.submit(release_memory).result()
    return folder, state.version


def place_for_weights(model_dir: Path, weights_dir: str | Path | None, run: Path | None) -> Path:
    """Return where weights are written for the server. Raises UsageError where a model of the hub leaves none."""
    if weights_dir is not None:
        return Path(weights_dir).absolute()
    if run is not None:  # not beside the model, which other runs begin with, too
        return run.absolute() / WEIGHTS
    if origin_of(model_dir) is not None:
        raise UsageError("a model of the hub lies in a cache, which is no place for a run's weights: give run_dir or weights_dir")
    return (model_dir / WEIGHTS).absolute()


def dtype_of_model(updates: Updates) -> torch.dtype:
    """Return the precision of the model's weights; frozen ones need no more than that of the computation."""
    return torch.bfloat16 if updates.in_bfloat16 and updates.lora_rank is not None else torch.float32


def _dtype_of_files(updates: Updates) -> torch.dtype | None:
    """Return that of the weights' files; None: the model's."""
    return torch.bfloat16 if updates.in_bfloat16 else None


def _takes_adapter(updates: Updates, adapter_rank: int) -> bool:
    return updates.lora_rank is not None and updates.lora_rank <= adapter_rank


def _served_from(updates: Updates, checkpoint: Path, run: Path, version: int, *, adapter_rank: int) -> Path:
    if updates.lora_rank is None:
        return checkpoint
    return checkpoint / ADAPTER if _takes_adapter(updates, adapter_rank) else run / WEIGHTS / str(version)
