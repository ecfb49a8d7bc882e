"""Write the weights of a run as a model's folder, which transformers, peft and vLLM open: `agl-otel runs export`.

The folder is written beside its place and renamed, so that it is complete or absent. A run that goes on meanwhile is not disturbed: its
checkpoints are only read, and where it has removed one of them, the next is taken. Imports torch only to convert weights, and to merge
an adapter into the model that its run began with.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.base_model import find_base
from agl_otel.algorithms.checked_files import DIGESTS, changed_files, without_checksum
from agl_otel.algorithms.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG_FILE,
    DTYPES,
    INDEX_FILE,
    POLICY,
    WEIGHTS_FILE,
    as_os_errors,
    read_header,
    small_files,
    weights_files,
)
from agl_otel.algorithms.run_folder import RUN, read_run
from agl_otel.algorithms.run_result import RunResult, kept_weights, result_of
from agl_otel.errors import DataError, SettingsError, UsageError, unwritable
from agl_otel.service.framed import sync_file, sync_folder
from agl_otel.service.lock import folder_beside

TRIES: Final = 5  # checkpoints that a running run may remove while they are read
BLOCK_BYTES: Final = 1 << 22
VERL_ADAPTER: Final = "lora_adapter"
"""The folder that verl.model_merger makes of a LoRA run's adapter."""
_STATE: Final = "state.json"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: str
    run: str
    which: str
    step: int
    adapter: bool
    dtype: str
    """Of most of the weights, as torch names it."""
    bytes: int
    best_missing: str | None = None
    """Where the run had the weights of its best validation, where these are gone and the last ones were written instead."""


def export_model(
    run: Path,
    target: Path,
    *,
    step: int | None = None,
    last: bool = False,
    adapter: bool = False,
    dtype: str | None = None,
    base: str | None = None,
) -> Exported:
    """Write the weights of the run in a folder to `target`: of the best validation, where there is one, else the last ones.

    Args:
        run: the run's folder.
        target: a folder that is empty or does not exist.
        step: after which step instead; `last`: the last ones.
        adapter: write the LoRA adapter in PEFT's format, instead of all weights with the adapter merged in.
        dtype: of the weights, as "bfloat16"; None: as the run has them.
        base: where the model now is that a LoRA run began with: a folder, or a model of the hub; None: where the checkpoint names it.

    Raises:
        UsageError: `target` is not empty, the run has no such weights, or its base model is missing or another one.
        DataError: the checkpoint or run.json is damaged.
        SettingsError: a package is missing, or `target` cannot be written.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(_not_empty(target))
    for left in range(TRIES, 0, -1):
        found = result_of(run, step=step, last=last)
        if found.step is None:
            raise UsageError(f"the run in {found.run} made prompts, not weights: they are in {found.path}")
        try:
            return _export(found, found.step, target, adapter=adapter, dtype=dtype, base=base)
        except FileNotFoundError as error:
            if step is not None or left == 1 or result_of(run, last=last).path == found.path:
                raise DataError(f"{error.filename} is missing: {_other(found)}") from error
    raise AssertionError


def _export(found: RunResult, step: int, target: Path, *, adapter: bool, dtype: str | None, base: str | None) -> Exported:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target) as beside:
            written, size = _write_whole(found, target, beside, adapter=adapter, dtype=dtype, base=base)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError(_not_empty(target)) from error  # another export wrote it meanwhile
        raise SettingsError(unwritable(str(target), error)) from error
    return Exported(str(target), str(found.run), found.which, step, adapter, written, size, found.best_missing)


def _write_whole(found: RunResult, target: Path, beside: Path, *, adapter: bool, dtype: str | None, base: str | None) -> tuple[str, int]:
    """Write the model to `beside`, and rename that to `target`; return the precision of the weights and the size in bytes."""
    beside.chmod(0o755)
    if str(read_run(found.run / RUN)["algorithm"]) == "verl":
        _write_verl(found, beside, adapter=adapter)
    elif adapter:
        _write_adapter(found, beside)
    else:
        _write_model(found, beside, base)
    if dtype is not None:
        for path in beside.glob("*.safetensors"):
            _convert(path, dtype)
    written = _most_common_dtype(beside)
    if (beside / CONFIG_FILE).exists():
        _name_dtype(beside / CONFIG_FILE, written)
    for path in beside.iterdir():
        sync_file(path)
    size = sum(path.stat().st_size for path in beside.iterdir())
    beside.replace(target)
    sync_folder(target.parent)
    return written, size


def _not_empty(target: Path) -> str:
    return f"{target} is not empty: name an empty folder, or a new one"


def _write_model(found: RunResult, folder: Path, base: str | None) -> None:
    policy = found.run / POLICY
    if not (policy / CONFIG_FILE).exists():
        raise DataError(f"{policy} holds no {CONFIG_FILE} of the run's model: copy the model's files there, all but its weights")
    for path in small_files(policy):
        shutil.copyfile(path, folder / path.name)
    if named := _state(found).get("base"):
        _merge(found, named, folder, base)
    else:
        _copy_verified(found, WEIGHTS_FILE, folder)


def _merge(found: RunResult, named: Mapping[str, str], folder: Path, given: str | None) -> None:
    """Write the weights of the model that a LoRA checkpoint names, with the adapter merged in. Raises SettingsError without torch, peft."""
    model = find_base(named, found.run, given=given)
    try:
        import torch
        from transformers.utils.logging import disable_progress_bar

        from agl_otel.algorithms.grpo.policy import save_merged
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"merging an adapter needs the [train] extra ({error.name} is missing): pip install 'agl-otel[train,lora]', or write it alone "
            "with --adapter"
        ) from error
    disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=folder) as copied:  # the run may remove the checkpoint meanwhile
        for name in (ADAPTER_CONFIG, ADAPTER_FILE):
            _copy_verified(found, f"{ADAPTER}/{name}", Path(copied))
        save_merged(model, Path(copied), folder, dtype=getattr(torch, named["dtype"]))


def _write_adapter(found: RunResult, folder: Path) -> None:
    if f"{ADAPTER}/{ADAPTER_CONFIG}" not in _digests(found):
        raise UsageError(f"the run in {found.run} trained all weights and has no adapter (lora_rank): leave out --adapter")
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        _copy_verified(found, f"{ADAPTER}/{name}", folder)
    if model := read_run(found.run / RUN).get("model"):
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        config |= {"base_model_name_or_path": model["id"], "revision": model["commit"]}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_verified(found: RunResult, name: str, folder: Path) -> None:
    """Copy a file, and compare it with its digest on the way. Raises DataError where it has changed since it was written."""
    whole, digests = hashlib.sha256(), _digests(found)
    with (found.path / name).open("rb") as source, (folder / Path(name).name).open("wb") as target:
        while block := source.read(BLOCK_BYTES):
            whole.update(block)
            target.write(block)
    if digests.get(name) != whole.hexdigest():
        raise DataError(f"{found.path / name} is damaged (it has changed since it was written): {_other(found)}")


def _digests(found: RunResult) -> Mapping[str, str]:
    return _state(found)["files"]


def _state(found: RunResult) -> Mapping[str, Any]:
    """Return the content of a checkpoint's state.json; of weights with digests alone {"files": digests}."""
    file = found.path / (_STATE if (found.path / _STATE).exists() else DIGESTS)
    try:
        content: dict[str, Any] = without_checksum(file.read_bytes(), needed=True)
        return content if file.name == _STATE else {"files": content}
    except ValueError as error:
        raise DataError(f"{file} is damaged ({error}): {_other(found)}") from error


def _other(found: RunResult) -> str:
    """Return what to export instead of damaged weights."""
    others = [step for step in kept_weights(found.run) if step != found.step]
    return f"export others with --step {others[-1]}" if others else "the run keeps no others, restore the file"


# --- verl's checkpoints


def _write_verl(found: RunResult, folder: Path, *, adapter: bool) -> None:
    """Write the model of a checkpoint of verl: the one that it holds in transformers' format, else what verl's own program merges."""
    if changed := changed_files(found.path):
        raise DataError(f"{found.path / changed[0]} is damaged (it has changed since it was written): {_other(found)}")
    actor = found.path / "actor"
    if adapter:
        raise UsageError("--adapter is for runs of grpo: verl's own program merges its checkpoints; leave it out")
    if not actor.is_dir():
        raise UsageError(f'{found.path} holds no model: let actor.checkpoint.save_contents of verl\'s config have "model"')
    whole = actor / "huggingface"
    if (whole / CONFIG_FILE).exists() and (files := weights_files(whole)):
        if any(".lora_" in name for path in files for name in _header(path)):
            _refuse_adapter(actor)
        index = [whole / INDEX_FILE] if (whole / INDEX_FILE).exists() and len(files) > 1 else []
        for path in [*small_files(whole), *files, *index]:
            shutil.copyfile(path, folder / path.name)
        return
    if find_spec("verl") is None:
        raise SettingsError(
            f"{found.path} is in verl's format, and its own program merges it, which needs the [verl] extra (verl is missing): "
            "call this command in the environment of the run"
        )
    backend = "fsdp" if (actor / "fsdp_config.json").exists() else "megatron"
    words = [
        sys.executable,
        "-m",
        "verl.model_merger",
        "merge",
        "--backend",
        backend,
        "--local_dir",
        str(actor),
        "--target_dir",
        str(folder),
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise DataError(f"verl.model_merger could not merge {actor} (exit code {done.returncode}): {done.stdout[-2000:]}")
    if (folder / VERL_ADAPTER).exists():
        _refuse_adapter(actor)


def _refuse_adapter(actor: Path) -> None:
    raise UsageError(
        f"{actor} holds a LoRA adapter, which verl's own program writes beside the weights that the run began with, and does not merge: "
        f"call python -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir DIR, compare lora_alpha in "
        f"DIR/{VERL_ADAPTER}/{ADAPTER_CONFIG} with the run's, and merge it with peft"
    )


# --- the precision of weights


def _convert(file: Path, dtype: str) -> None:
    """Convert the floating-point tensors of a file. Raises SettingsError without torch."""
    try:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise SettingsError(f"--dtype needs the [train] extra ({error.name} is missing): pip install 'agl-otel[train]'") from error
    new: torch.dtype = getattr(torch, dtype)
    with safe_open(file, framework="pt") as opened:
        loaded = ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118  # it is no dict
        tensors = {name: tensor.to(new) if tensor.is_floating_point() else tensor for name, tensor in loaded}
    with as_os_errors(beside := file.with_name(f".{file.name}")):
        save_file(tensors, beside, metadata={"format": "pt"})
    beside.chmod(stat.S_IMODE(file.stat().st_mode))  # safetensors makes files that only their owner may read
    beside.replace(file)


def _most_common_dtype(folder: Path) -> str:
    """Return the precision of most of the weights, from the files' headers."""
    sizes = Counter[str]()
    for path in folder.glob("*.safetensors"):
        for tensor in _header(path).values():
            first, end = tensor["data_offsets"]
            sizes[tensor["dtype"]] += end - first
    most = sizes.most_common(1)[0][0] if sizes else "F32"
    return DTYPES.get(most, most.lower())


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return read_header(file)[1]


def _name_dtype(path: Path, dtype: str) -> None:
    """Name the precision of the weights in config.json, by which transformers and vLLM load them."""

    def named(table: dict[str, Any]) -> dict[str, Any]:
        inner = {key: named(value) if isinstance(value, dict) else value for key, value in table.items()}
        return {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in inner.items()}

    config = json.loads(path.read_text(encoding="utf-8"))
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = dtype
    path.write_text(json.dumps(named(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
