"""The folder of one run: which run it is, that one process works on it, and a line for each of its steps.

    run.json        the run's id, its algorithm, its options without secrets (text.py), its seed
    lock            held while a process works on the run
    metrics.jsonl   a line for each step

Each line, and run.json, has a checksum of what it says (`sealed`), which does not change when the JSON is written with other spaces or
keys in another order. What was damaged is refused: it is named with its line, and a copy is kept beside (NAME.damaged).

What else a run keeps to go on with is its algorithm's business: a journal (prompts/journal.py), checkpoints (grpo/checkpoint.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, cast

from agl_otel.errors import FULL_DISK, DataError, DiskFullError, SettingsError, UsageError
from agl_otel.service.framed import free_name
from agl_otel.service.lock import FileLock
from agl_otel.service.private import open_file
from agl_otel.text import without_secrets

RUN: Final = "run.json"
METRICS: Final = "metrics.jsonl"
DIGESTS: Final = "digests.json"
"""The SHA-256 of files too large for a checksum within, by their names."""
CHECKSUM: Final = "checksum"
_RUN_FIELDS: Final = ("run_id", "algorithm", "seed", "options")
FINGERPRINT_BYTES: Final = 1 << 20  # of each file: weights of gigabytes are not read whole to tell one model from another


def digest_of(*values: Any) -> str:
    """16 hex characters that stand for these values; equal JSON, equal digest."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def new_run_id(algorithm: str) -> str:
    """An id for a new run, fit to stand in rollout ids."""
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', algorithm).strip('-')[:64]}-{uuid.uuid4().hex[:8]}"


def new_seed() -> int:
    """A seed for a run that was given none: 32 bits."""
    return uuid.uuid4().int % 2**32


class RunFolder:
    """The folder of a run, held until `close`.

    Args:
        folder: made where it is missing; a run that is there is gone on with.
        algorithm: its name.
        options: what decides the course of the run, as JSON. A run that was begun with others is refused.
        seed: None goes on with the run's own, and draws one for a new run.

    Raises UsageError for a folder of another run, InUseError where one works in it, DataError for a damaged run.json, SettingsError
    where the folder cannot be written.
    """

    def __init__(self, folder: Path, *, algorithm: str, options: Mapping[str, Any], seed: int | None = None) -> None:
        self.folder = folder
        self.run_id = new_run_id(algorithm)
        self.seed = seed if seed is not None else new_seed()
        self._metrics: IO[str] | None = None
        self._checked = True
        self._lock = FileLock.hold(
            folder / "lock",
            what=f"the run's folder {folder}",
            taken=lambda pid: f"another process works on the run in {folder} (pid {pid}): wait for its end, or choose another folder",
            other="choose another folder",
        )
        try:
            self._begin(folder / RUN, algorithm, json.loads(json.dumps(options, default=str)), seed)
        except OSError as error:
            self.close()
            raise SettingsError(f"the run's folder {folder} cannot be written: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder."""
        if self._metrics is not None:
            with suppress(OSError):  # of a full disk; `metric` has said so
                self._metrics.close()
            self._metrics = None
        self._lock.close()

    # --- a line for each step

    def metric(self, row: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; it is on disk when this returns. Raises UsageError where the row has a `checksum` of its own."""
        with _room_for(self.folder / METRICS):
            if self._metrics is None:
                self._metrics = open_file(self.folder / METRICS, "a")
            self._metrics.write(json.dumps(sealed(row), ensure_ascii=False) + "\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def metrics(self, count: int | None) -> list[dict[str, Any]]:
        """The first `count` lines of metrics.jsonl, None for all whole ones; what follows is cut off.

        Raises DataError where some are missing or damaged.
        """
        path = self.folder / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        count = sum(line.endswith(b"\n") for line in lines) if count is None else count
        lines = lines[:count]
        rows = [self._row(path, number, line) for number, line in enumerate(lines, 1)]
        if len(rows) < count or not all(line.endswith(b"\n") for line in lines):
            raise DataError(f"{path} has {len(rows)} of the {count} steps that the run has done: bring it back, or choose a new folder")
        if path.exists():
            os.truncate(path, sum(map(len, lines)))
        return rows

    def _row(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        try:
            return unsealed(line, needed=self._checked)
        except ValueError as error:
            raise damaged(path, error, line=number) from error

    # --- the folder

    def _begin(self, path: Path, algorithm: str, given: dict[str, Any], seed: int | None) -> None:
        options = without_secrets(given)  # a run is gone on with by what it is given then; this copy says whether that is the same run
        if not path.exists():
            write_json(path, sealed({"run_id": self.run_id, "algorithm": algorithm, "seed": self.seed, "options": options}))
            return
        begun = read_run(path)
        try:
            before: dict[str, Any] = without_secrets(begun["options"])
            other = [name for name in {*options, *before} if options.get(name) != before.get(name)]
        except TypeError as error:
            raise damaged(path, error) from error
        self.run_id, self.seed, self._checked = begun["run_id"], begun["seed"], CHECKSUM in begun
        other += ["algorithm"] if begun["algorithm"] != algorithm else []
        other += ["seed"] if seed is not None and self.seed != seed else []
        if before != begun.get("options") and not other:
            content = {name: begun[name] for name in _RUN_FIELDS} | {"options": before}  # an earlier release knew fewer secrets
            write_json(path, sealed(content) if self._checked else content)
        if other:
            raise UsageError(
                f"the run in {path.parent} was begun with another {', '.join(sorted(other))}: give what run.json says, or a new folder"
            )


@contextmanager
def kept(
    where: str | Path | RunFolder | None, *, algorithm: str, options: Callable[[], Mapping[str, Any]], seed: int | None
) -> Generator[RunFolder | None]:
    """The folder of a run for the while that it works; one that somebody else holds stays held. None: a run in memory.

    Raises what RunFolder raises.
    """
    if where is None or isinstance(where, RunFolder):
        yield where
        return
    with closing(RunFolder(Path(where).absolute(), algorithm=algorithm, options=options(), seed=seed)) as run:
        yield run


def course_of(options: Mapping[str, Any], tasks: Sequence[Any], *, model_dir: str | Path, without: Collection[str]) -> dict[str, Any]:
    """What decides the course of a run beside its seed, as JSON: its options, tasks and model.

    `without` names the options that may be others when the run is resumed. Raises UsageError where `model_dir` holds no model.
    """
    compared = {name: value for name, value in options.items() if name not in without}
    config = options["rollout_config"].model_dump() if options["rollout_config"] is not None else None
    return {**compared, "rollout_config": config, "tasks": digest_of(list(tasks)), "model": fingerprint(model_dir)}


def fingerprint(folder: str | Path) -> str:
    """16 hex characters that stand for the model in `folder`: its config, the sizes of its weights' files, and their ends.

    Raises UsageError where there is no config.
    """
    found = hashlib.sha256()
    try:
        found.update((Path(folder) / "config.json").read_bytes())
        for path in sorted(Path(folder).glob("*.safetensors")):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - FINGERPRINT_BYTES))
                found.update(f"{path.name} {size}".encode() + file.read())
    except OSError as error:
        raise UsageError(f"{folder} holds no model that transformers can load: {error}") from error
    return found.hexdigest()[:16]


def read_run(path: Path) -> dict[str, Any]:
    """What run.json holds, with its checksum, which that of a run begun by an earlier release lacks.

    Raises DataError where it is damaged; a copy is kept beside it then.
    """
    try:
        content = path.read_bytes()
        fields = unsealed(content)
        if set(fields) != {*_RUN_FIELDS}:
            raise ValueError(f"its fields are {', '.join(sorted(fields))}")
        return json.loads(content)
    except ValueError as error:
        raise damaged(path, error) from error


def read_sealed(path: Path) -> dict[str, Any]:
    """What such a file holds. Raises DataError where it is damaged; a copy is kept beside it then."""
    try:
        return unsealed(path.read_bytes())
    except ValueError as error:
        raise damaged(path, error) from error


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as JSON has it, with a checksum of it. Raises UsageError where it has a `checksum` of its own."""
    if CHECKSUM in value:
        raise UsageError(f"the name {CHECKSUM!r} is taken: give the field another one")
    plain = json.loads(json.dumps(value))
    return {**plain, CHECKSUM: digest_of(plain)}


def unsealed(text: bytes, *, needed: bool = False) -> dict[str, Any]:
    """What was `sealed`, without the checksum. Raises ValueError where that is another's; a missing one only where it is `needed`."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    found = cast("dict[str, Any]", value)
    told = found.pop(CHECKSUM, None)
    if told != digest_of(found) and (needed or told is not None):
        raise ValueError("its checksum is that of another content" if told is not None else "it has no checksum")
    return found


def damaged(path: Path, error: Exception, *, line: int | None = None) -> DataError:
    """What to raise for a file of a run that cannot be gone on with; a copy of it is kept beside."""
    copies = path.parent.glob(f"{path.name}*.damaged")
    aside = next((copy for copy in copies if copy.read_bytes() == path.read_bytes()), None)
    if aside is None:
        aside = free_name(path)
        shutil.copy2(path, aside)
    where = f"{path}, line {line}," if line is not None else str(path)
    return DataError(f"{where} is damaged ({error}): bring the file back, or choose a new folder. A copy of it is {aside.name}")


def write_digests(folder: Path, names: Iterable[str]) -> None:
    """Write digests.json, which says what is in these files of the folder."""
    write_json(folder / DIGESTS, sealed({name: file_digest(folder / name) for name in names}))


def other_files(folder: Path) -> list[str]:
    """The files of the folder that are not what digests.json says, itself included; none where there is no digests.json."""
    try:
        digests = unsealed((folder / DIGESTS).read_bytes(), needed=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [DIGESTS]
    return [name for name, digest in digests.items() if file_digest(folder / name) != digest]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file in hex; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole; a reader, also one after a power cut, sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.new")
    with _room_for(path), open_file(beside, "w") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


@contextmanager
def _room_for(path: Path) -> Generator[None]:
    """Raises DiskFullError that names `path` where there is no room for it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DiskFullError.of(str(path), error.strerror) from error


def sync_file(path: Path) -> None:
    """Have a file's content on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
