"""Files of a run that survive kills and damage: written whole, with a checksum of their values, or with digests of large ones.

A checksum is independent of spaces and of the order of keys. A damaged file is refused with its name, and copied to NAME.damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from agl_otel.errors import FULL_DISK, DataError, DiskFullError, UsageError
from agl_otel.service.framed import free_name, sync_folder
from agl_otel.service.private import open_file

DIGESTS: Final = "digests.json"
"""Holds {file name: SHA-256} for files too large to contain a checksum."""
CHECKSUM: Final = "checksum"


def digest_of(*values: Any) -> str:
    """Return a digest of the values' JSON: 16 hex characters of SHA-256."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_checked(path: Path) -> dict[str, Any]:
    """Read a JSON file with a checksum. Raises DataError where it is damaged or has none, after copying it."""
    try:
        return without_checksum(path.read_bytes(), needed=True)
    except ValueError as error:
        raise damaged_error(path, error) from error


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` as JSON values with a `checksum` of it. Raises UsageError where it already has one."""
    if CHECKSUM in value:
        raise UsageError(f"the field name {CHECKSUM!r} is reserved: rename the field")
    plain = json.loads(json.dumps(value))
    return {**plain, CHECKSUM: digest_of(plain)}


def without_checksum(text: bytes, *, needed: bool = False) -> dict[str, Any]:
    """Parse JSON and remove its checksum. Raises ValueError where it does not match, or, if `needed`, where it is missing."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    fields = cast("dict[str, Any]", value)
    checksum = fields.pop(CHECKSUM, None)
    if checksum != digest_of(fields) and (needed or checksum is not None):
        raise ValueError("its checksum does not match" if checksum is not None else "it has no checksum")
    return fields


def damaged_error(path: Path, error: Exception, *, line: int | None = None) -> DataError:
    """Copy a damaged file of a run (NAME.damaged), and return the error to raise."""
    copies = path.parent.glob(f"{path.name}*.damaged")
    saved = next((copy for copy in copies if copy.read_bytes() == path.read_bytes()), None)
    if saved is None:
        saved = free_name(path)
        shutil.copy2(path, saved)
    where = f"{path}, line {line}," if line is not None else str(path)
    return DataError(f"{where} is damaged ({error}): restore the file, or choose a new folder. A copy of it is {saved.name}")


def write_digests(folder: Path, names: Iterable[str]) -> None:
    """Write digests.json with the digests of these files of the folder."""
    write_json(folder / DIGESTS, with_checksum({name: file_digest(folder / name) for name in names}))


def changed_files(folder: Path) -> list[str]:
    """List the files, including digests.json, that do not match the folder's digests.json; empty where there is none."""
    try:
        digests = without_checksum((folder / DIGESTS).read_bytes(), needed=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [DIGESTS]
    return [name for name, digest in digests.items() if file_digest(folder / name) != digest]


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file, in hex; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def remove_whole(folder: Path) -> None:
    """Remove a folder that others read: it is whole or absent under its name, wherever this process is killed.

    Of a killed process it leaves `.NAME` beside it.
    """
    beside = folder.with_name(f".{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    folder.replace(beside)
    shutil.rmtree(beside)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically and durably."""
    temporary = path.with_name(f".{path.name}.new")
    with disk_full_names(path), open_file(temporary, "w") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


@contextmanager
def disk_full_names(path: Path) -> Generator[None]:
    """Turn a disk-full OSError into a DiskFullError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DiskFullError.of(str(path), error.strerror) from error
