"""The files of a model's folder in transformers' format: its weights, and the small ones beside them, which a run keeps. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Final

from agl_otel.errors import FULL_DISK, DiskFullError, UsageError, writing

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = f"{WEIGHTS_FILE}.index.json"
CONFIG_FILE: Final = "config.json"
PICKLED_WEIGHTS: Final = "pytorch_model*.bin"
"""Weights in PyTorch's own format, which transformers loads where there are none in safetensors'."""
ADAPTER: Final = "adapter"
"""The folder of a checkpoint with its LoRA adapter."""
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""PEFT's; a folder with it holds a LoRA adapter."""
POLICY: Final = "policy"
"""The folder of a run with the small files of its model; of the tiny model, which the run makes, also its weights."""
DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""{dtype in safetensors' format (https://github.com/huggingface/safetensors#format): torch's name of it}."""
FINGERPRINT_BYTES: Final = 1 << 20  # read from the end of each weights file, which may have gigabytes, and as much spread over it
FINGERPRINT_BLOCKS: Final = 64
TENSOR_BYTES: Final = 1 << 13  # of each tensor, at its start: 2 MB of the 291 tensors of a model of 8B, and small tensors are read whole
HEADER_BYTES: Final = 100_000_000  # the longest header that safetensors reads
SMALL_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
"""Config, generation config, tokenizer, chat template and licence."""


def is_small_file(name: str) -> bool:
    """Whether a file of a model's folder, by its name, is none of its weights, and needed beside them."""
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES) and not name.endswith(".index.json")


def small_files(folder: Path) -> list[Path]:
    """List the model's files without its weights."""
    return sorted(path for path in folder.iterdir() if path.is_file() and is_small_file(path.name))


def weights_files(folder: Path) -> list[Path]:
    """List the files of the weights that transformers loads: model.safetensors, else those of its index, else all *.safetensors."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    try:
        return sorted({folder / name for name in json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return sorted(folder.glob("*.safetensors"))


def read_header(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """Read the header of an open file in safetensors' format (see DTYPES): its JSON, and what that says of the tensors, {name: {"dtype",
    "shape", "data_offsets"}}. Raises ValueError for a file of another format.
    """
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    tensors: dict[str, Any] = json.loads(header := file.read(length))
    return header, {name: fields for name, fields in tensors.items() if name != "__metadata__"}


def tensor_starts(file: BinaryIO) -> tuple[bytes, list[int]]:
    """Return the header of an open file in safetensors' format, and where each tensor starts, in bytes from the file's start, in order.
    Returns nothing of either for a file of another format.
    """
    try:
        header, tensors = read_header(file)
        return header, sorted(8 + len(header) + max(0, int(fields["data_offsets"][0])) for fields in tensors.values())
    except (ValueError, LookupError, TypeError, AttributeError):
        return b"", []


@contextmanager
def replacing_files(folder: Path) -> Generator[Path]:
    """Create `folder`, and give a temporary one within it, whose files replace those of their names at the end of the block.

    Each is replaced as a whole, weights after what describes them. Nothing is flushed to disk: a run that is resumed writes what it pushes
    again, and checkpoints and exports flush their files before they rename their folder. Raises DiskFullError.
    """
    beside = folder / ".new"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in sorted(beside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)):
            path.replace(folder / path.name)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise DiskFullError.of(f"the weights in {folder}", error.strerror) from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def as_os_errors(path: Path) -> Generator[None]:
    """Turn the error of safetensors, by its Rust library, for a file that cannot be written into the OSError that it quotes."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if (quoted := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(number := int(quoted[1]), os.strerror(number), str(path)) from error


def keep_small_files(model: Path, run: Path) -> None:
    """Copy the model's small files to the run's folder, all or none, so that an export needs no other folder; once for each run.

    Raises SettingsError where they cannot be written.
    """
    place = run / POLICY
    if (place / CONFIG_FILE).exists():
        return
    beside = run / f".{POLICY}"
    shutil.rmtree(beside, ignore_errors=True)
    with writing(str(place)):
        try:
            beside.mkdir(parents=True)
            for path in small_files(model):
                shutil.copyfile(path, beside / path.name)
            beside.replace(place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def model_fingerprint(folder: str | Path) -> str:
    """Return a digest of the model in `folder`: 16 hex characters over its small files (tokenizer and chat template, too), and of its
    weights' files the sizes, their ends, blocks spread over them, and in safetensors' format the header and a block of each tensor.

    Raises UsageError where there is no config.
    """
    found = hashlib.sha256()
    try:
        found.update((Path(folder) / CONFIG_FILE).read_bytes())
        for path in small_files(Path(folder)):
            if not path.name.startswith(("LICENSE", "NOTICE")):
                found.update(path.name.encode() + path.read_bytes())
        for path in weights_files(Path(folder)) or sorted(Path(folder).glob(PICKLED_WEIGHTS)):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                header, tensors = tensor_starts(file)
                found.update(f"{path.name} {size}".encode() + header)
                spread = [size * block // FINGERPRINT_BLOCKS for block in range(FINGERPRINT_BLOCKS)]
                for length, starts in ((TENSOR_BYTES, tensors), (FINGERPRINT_BYTES // FINGERPRINT_BLOCKS, spread)):
                    for start in starts:
                        file.seek(start)
                        found.update(file.read(length))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                found.update(file.read())
    except OSError as error:
        raise UsageError(f"{folder} holds no model that transformers can load: {error}") from error
    return found.hexdigest()[:16]
