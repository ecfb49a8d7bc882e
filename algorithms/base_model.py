"""The model that a LoRA run began with. Its checkpoints hold the adapter alone, and name the model to which it belongs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agl_otel.algorithms.hub import model_folder, origin_of
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.errors import UsageError


def name_of_base(model: Path, run: Path, *, dtype: str) -> dict[str, str]:
    """Return what a checkpoint names the model in a folder by, as JSON.

    The keys are "digest" (model_files.model_fingerprint), "dtype" of its weights beside the adapter, as torch names it, and "id" and
    "commit" of a model of the hub, else "folder"; that is relative to the run's, where it lies within. Raises UsageError for no model.
    """
    place, run = model.absolute(), run.absolute()
    folder = {"folder": str(place.relative_to(run) if place.is_relative_to(run) else place)}
    return {"digest": model_fingerprint(model), "dtype": dtype, **(origin_of(model) or folder)}


def find_base(base: Mapping[str, str], run: Path, *, given: str | None = None) -> Path:
    """Return the folder of the model that a checkpoint of a run's folder names; `given`: a folder or a model of the hub to take instead.

    Raises UsageError where it is missing or is another one, and what hub.find_model raises.
    """
    if given is not None:
        folder = model_folder(given)
    elif "id" in base:
        folder = model_folder(f"{base['id']}@{base['commit']}")
    else:
        folder = run / base["folder"]
    check_base(base, folder, remedy="name the folder of the model that the run began with by --base")
    return folder


def check_base(base: Mapping[str, str], folder: Path, *, remedy: str) -> None:
    """Raise UsageError, with the remedy, where a folder does not hold the model that a checkpoint names."""
    try:
        digest = model_fingerprint(folder)
    except UsageError as error:
        raise UsageError(f"{error}: {remedy}") from error
    if digest != base["digest"]:
        raise UsageError(
            f"{folder} is another model, of digest {digest}, than the one, of digest {base['digest']}, that the adapter was trained on: "
            f"{remedy}"
        )
