"""Find verl's last checkpoint in a run's folder and verify it against digests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from agl_otel.algorithms.checked_files import DIGESTS, changed_files, damaged_error, write_digests
from agl_otel.errors import AglError, DataError

_logger = logging.getLogger(__name__)
CHECKPOINT: Final = "checkpoints/latest_checkpointed_iteration.txt"
STEP: Final = "global_step_"
"""Prefix of the step in the names of checkpoint folders."""


def note_checkpoint(place: Path) -> None:
    """Write the digests of verl's last checkpoint into its folder, unless they are there. Failures are logged."""
    try:
        step = _checkpoint(place)
        folder = _folder_of(place, step)
        if step and not (folder / DIGESTS).exists():
            write_digests(folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    except ValueError:
        return  # verl is writing its file
    except (OSError, AglError) as error:
        _logger.warning("the last checkpoint in %s has no digests: %s", place, error)


def last_step(place: Path) -> int:
    """Return the step of the checkpoint from which verl resumes, 0 without one. Raises DataError where the checkpoint is damaged."""
    try:
        step = _checkpoint(place)
    except ValueError as error:
        raise damaged_error(place / CHECKPOINT, error) from error
    folder = _folder_of(place, step)
    if changed := changed_files(folder):
        raise DataError(
            f"the checkpoint {folder} is damaged ({', '.join(changed)} has changed since it was written): restore it, or remove it and "
            f"name an earlier one in {place / CHECKPOINT}"
        )
    return step


def _checkpoint(place: Path) -> int:
    """Read the step of the last checkpoint from verl's file; 0 without one. Raises ValueError where that checkpoint is missing."""
    path = place / CHECKPOINT
    if not path.exists():
        return 0
    step = int(path.read_text())
    noted = max((int(digests.parent.name.removeprefix(STEP)) for digests in path.parent.glob(f"{STEP}*/{DIGESTS}")), default=0)
    if step < noted or not _folder_of(place, step).is_dir():
        raise ValueError(f"it names step {step}; the last checkpoint that was noted is that of step {noted}")
    return step


def _folder_of(place: Path, step: int) -> Path:
    return (place / CHECKPOINT).parent / f"{STEP}{step}"
