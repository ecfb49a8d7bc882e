"""Models of the Hugging Face hub, named owner/name or owner/name@revision, by huggingface_hub. A folder that exists is taken first.

A revision is a branch, a tag or a commit. A run records the commit, and takes that one again when it is resumed. HF_ENDPOINT, HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE have huggingface_hub's meaning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.model_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, is_small_file, weights_files
from agl_otel.algorithms.run_folder import RUN, read_run
from agl_otel.errors import SettingsError, UnavailableError
from agl_otel.text import error_text

_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.][\w./-]*))?")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubModel:
    """A model of the hub at one commit."""

    id: str
    commit: str
    revision: str | None
    """By which it was found; None: its branch main."""
    small: Mapping[str, int]
    """{name: bytes} of config, tokenizer and chat template."""
    weights: Mapping[str, int]
    """{name: bytes} of the weights that transformers loads."""

    @property
    def shown(self) -> str:
        """Id, commit and size, for a message."""
        count, size = len(self.small) + len(self.weights), sum([*self.small.values(), *self.weights.values()])
        return f"{self.id} (commit {self.commit[:12]}, {size / 1e6:,.1f} MB in {count} files)"

    @property
    def is_cached(self) -> bool:
        """Whether all of its files are in huggingface_hub's cache."""
        from huggingface_hub import try_to_load_from_cache

        found = (try_to_load_from_cache(self.id, name, revision=self.commit) for name in (*self.small, *self.weights))
        return all(isinstance(path, str) for path in found)

    def fetch(self, *, weights: bool = True) -> Path:
        """Download what is not in huggingface_hub's cache; return the folder. Raises UnavailableError."""
        from huggingface_hub import snapshot_download

        wanted = [*self.small, *(self.weights if weights else ())]
        try:
            if self.is_cached:
                return Path(snapshot_download(self.id, revision=self.commit, allow_patterns=wanted, local_files_only=True))
            # by its revision, so that the cache knows the branch, too
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=wanted))
        except _unreachable() as error:
            raise UnavailableError(
                f"the model {self.id} could not be downloaded ({error_text(error)}): check the network and the disk's free space, then "
                "start again; files that are there already are not downloaded again"
            ) from error

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Read the headers of its weights: {name: (shape, safetensors' name of the dtype)}; {} for weights in another format."""
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError

        try:
            found = get_safetensors_metadata(self.id, revision=self.commit)
        except NotASafetensorsRepoError:
            return {}
        except _unreachable() as error:
            raise UnavailableError(f"the weights of {self.id} could not be looked at ({error_text(error)}): try again") from error
        return {name: (tuple(each.shape), each.dtype) for file in found.files_metadata.values() for name, each in file.tensors.items()}


def is_hub_id(model: str | Path, base: Path = Path()) -> bool:
    """Whether a model's name is one of the hub: it has the form of an id, and is no path that exists."""
    return _ID.fullmatch(str(model)) is not None and not (base / model).exists()


def find_model(model: str, *, commit: str | None = None) -> HubModel | Path:
    """Ask the hub for a model, at a commit or its own revision; where it cannot be reached, return the folder of it in the cache.

    Raises SettingsError for a model that is not there or not for the caller, UnavailableError where neither hub nor cache has it.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ModuleNotFoundError as error:
        raise SettingsError(f"models of the hub need the [train] extra ({error.name} is missing): pip install 'agl-otel[train]'") from error
    name, revision = _parts(model)
    where = constants.ENDPOINT
    try:
        info = HfApi().model_info(name, revision=commit or revision, files_metadata=True)
    except GatedRepoError as error:
        raise SettingsError(f"the model {name} is for those who accept its terms: do so at {where}/{name}, and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise SettingsError(f"the model {name} has no revision {commit or revision!r} at {where}: name a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise SettingsError(
            f"{model!r} is no folder, and there is no such model at {where}: name a folder that exists, or check the spelling; a private "
            "model needs HF_TOKEN"
        ) from error
    except _unreachable() as error:
        return _cached(model, name, commit or revision, error)
    files = {each.rfilename: each.size or 0 for each in info.siblings or () if "/" not in each.rfilename}
    weights = _weights_among(files)
    if not weights or CONFIG_FILE not in files:
        raise SettingsError(f"{name} at {where} holds no {CONFIG_FILE if weights else WEIGHTS_FILE}: name a model in transformers' format")
    return HubModel(name, str(info.sha), commit or revision, {each: size for each, size in files.items() if is_small_file(each)}, weights)


def model_folder(model: str | Path, base: Path = Path(), *, run: Path | None = None) -> Path:
    """Return the folder of a model: a path relative to `base`, or a model of the hub, which is downloaded unless it is in the cache.

    `run`: the folder of a run, which goes on with the commit that it recorded. Raises what `find_model` raises.
    """
    if not is_hub_id(model, base):
        return base / model
    found = find_model(str(model), commit=_recorded(str(model), run))
    if isinstance(found, Path):
        return found
    if not found.is_cached:
        from huggingface_hub import constants

        _logger.warning("downloading %s from %s to %s", found.shown, constants.ENDPOINT, constants.HF_HUB_CACHE)
    return found.fetch()


def origin_of(folder: str | Path) -> dict[str, str] | None:
    """Return {"id", "commit"} of a model in huggingface_hub's cache; None for other folders."""
    match Path(folder).parts:
        case (*_, str(repository), "snapshots", str(commit)) if repository.startswith("models--"):
            return {"id": repository.removeprefix("models--").replace("--", "/"), "commit": commit}
        case _:
            return None


def download_note(model: str | Path, base: Path = Path()) -> str | None:
    """Return what a run with this model would download, in words; None for nothing. Raises what `find_model` raises."""
    found = find_model(str(model)) if is_hub_id(model, base) else None
    return f"a run downloads {found.shown}" if isinstance(found, HubModel) and not found.is_cached else None


def _unreachable() -> tuple[type[Exception], ...]:
    """Return the errors of a hub that cannot be reached, or answers with an error."""
    from huggingface_hub import errors

    # of the HTTP client that this version of huggingface_hub uses
    return errors.HTTPError, OSError  # pyright: ignore[reportPrivateImportUsage] - the library re-exports it without saying so


def _parts(model: str) -> tuple[str, str | None]:
    found = _ID.fullmatch(model)
    assert found is not None
    return found["id"], found["revision"]


def _recorded(model: str, run: Path | None) -> str | None:
    """Return the commit that a run recorded for this model; None for one that names its revision."""
    name, revision = _parts(model)
    if run is None or revision is not None or not (run / RUN).exists():
        return None
    recorded: dict[str, Any] = read_run(run / RUN).get("model") or {}
    return recorded.get("commit") if recorded.get("id") == name else None


def _weights_among(files: Mapping[str, int]) -> dict[str, int]:
    """Return the files of the weights: safetensors, else PyTorch's own format, with the index of parts."""
    if WEIGHTS_FILE in files:
        return {WEIGHTS_FILE: files[WEIGHTS_FILE]}
    kinds = (("model-", ".safetensors", INDEX_FILE), ("pytorch_model", ".bin", "pytorch_model.bin.index.json"))
    for start, end, index in kinds:
        if found := {name: size for name, size in files.items() if name.startswith(start) and name.endswith(end)}:
            return found | ({index: files[index]} if index in files else {})
    return {}


def _cached(model: str, name: str, revision: str | None, error: Exception) -> Path:
    """Return the folder of a whole model in the cache. Raises UnavailableError, with the hub's `error`, where there is none."""
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(name, CONFIG_FILE, revision=revision)
    if isinstance(config, str) and (any((folder := Path(config).parent).glob("*.bin")) or _whole(folder)):
        return folder
    raise UnavailableError(
        f"{model!r} is no folder, the hub {constants.ENDPOINT} cannot be reached ({error_text(error)}), and {constants.HF_HUB_CACHE} does "
        f"not hold the whole model: name a folder that exists, or, for a machine without network, call `hf download {name}` elsewhere and "
        "copy it"
    ) from error


def _whole(folder: Path) -> bool:
    files = weights_files(folder)
    return bool(files) and all(file.exists() for file in files)
