"""The folder of one run: its identity, a lock, and a line for each step.

    run.json        the run's id, its algorithm, its options without secrets (text.py), its seed; of a job, digests of its code (`sources`),
                    and where it was resumed with other code (`forced`); of a model of the hub, id and commit (`model`)
    lock            held while a process works on the run
    metrics.jsonl   a line for each step

Each line, and run.json, has a checksum (checked_files.py); a damaged one is refused with its name and line, and copied to NAME.damaged.

Other files of a run belong to its algorithm: a journal (prompts/journal.py), checkpoints (grpo/checkpoint.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.base import Algorithm
from agl_otel.algorithms.checked_files import (
    CHECKSUM,
    damaged_error,
    digest_of,
    disk_full_names,
    with_checksum,
    without_checksum,
    write_json,
)
from agl_otel.algorithms.decorator import FunctionalAlgorithm
from agl_otel.algorithms.model_files import model_fingerprint
from agl_otel.algorithms.utils import items
from agl_otel.errors import DataError, InUseError, SettingsError, UsageError, writing
from agl_otel.service.lock import FileLock, holder
from agl_otel.service.private import open_file
from agl_otel.text import without_secrets
from agl_otel.types import Dataset, NamedResources

RUN: Final = "run.json"
METRICS: Final = "metrics.jsonl"
_LOCK: Final = "lock"
WEIGHTS: Final = "weights"
"""The folder with the weights that model servers read."""
BEST: Final = "best.json"
"""Of a search for prompts: the best candidate so far."""
RUN_DIR: Final = "run_dir"
"""The argument and attribute of an algorithm that opens its own run folder."""
_RUN_FIELDS: Final = ("run_id", "algorithm", "seed", "options")
_CODE_FIELDS: Final = ("sources", "forced")
_MODEL_FIELD: Final = "model"
AGENT: Final = "agent"
"""The option that names a job's agent and grader, which count as its code."""
LONGEST_SHOWN: Final = 120  # characters of the values of a changed option
SHOWN_DIGITS: Final = 12  # of a digest
_log = logging.getLogger(__name__)


def new_run_id(algorithm: str) -> str:
    """Return an id for a new run that is valid within rollout ids."""
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', algorithm).strip('-')[:64]}-{uuid.uuid4().hex[:8]}"


NEW_RUN: Final[ContextVar[tuple[Path, str] | None]] = ContextVar("agl_otel_new_run", default=None)
"""A folder, and the id of the run that is begun there in this context: it is known before the folder is opened."""


def run_id_of(folder: Path | None, algorithm: str) -> str:
    """Return the id of the run in this folder, a new one where there is none yet. Raises DataError where run.json is damaged."""
    if folder is not None and (folder / RUN).exists():
        return str(read_run(folder / RUN)["run_id"])
    return new_run_id(algorithm)


def new_seed() -> int:
    """Draw a 32-bit seed for a run."""
    return uuid.uuid4().int % 2**32


@dataclass(frozen=True)
class Fingerprint:
    """What a run is resumed with, and must have been begun with."""

    algorithm: str
    options: Mapping[str, Any]
    """As JSON, without secrets."""
    seed: int | None
    """None: that of the run."""

    @classmethod
    def of(cls, algorithm: str, options: Mapping[str, Any], seed: int | None) -> Fingerprint:
        """Make it of an algorithm's options, which need not be JSON yet."""
        return cls(algorithm, without_secrets(json.loads(json.dumps(options, default=str))), seed)

    def differences(self, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return {name: (value in the run.json `stored`, value now)} of the options, `algorithm` and `seed` that differ, sorted by name.

        None: it has no value. Raises TypeError where run.json is damaged.
        """
        before = {**without_secrets(stored["options"]), "algorithm": stored["algorithm"], "seed": stored["seed"]}
        now = {**self.options, "algorithm": self.algorithm, "seed": before["seed"] if self.seed is None else self.seed}
        pairs = {name: (before.get(name), now.get(name)) for name in sorted({*before, *now})}
        return {name: (was, is_now) for name, (was, is_now) in pairs.items() if was != is_now}


@dataclass(frozen=True)
class Sources:
    """The code of the job that runs."""

    digests: Mapping[str, str]
    """What jobs/sources.py finds: {role: reference, "role file": SHA-256}."""
    force: bool = False
    """Whether a run that was begun with other code is resumed all the same."""

    def check(self, folder: Path) -> None:
        """Log the changes since the run in this folder, if any, was begun. Raises UsageError for them without `force`; DataError."""
        if (folder / RUN).exists() and (changed := self.changes(read_run(folder / RUN))):
            if not self.force:
                raise UsageError(_refusal(folder, {}, changed))
            _log.warning("the run in %s goes on with other code (%s)", folder, _told(changed))

    def changes(self, stored: Mapping[str, Any]) -> dict[str, list[str | None]]:
        """Return {key of `digests`: [its value in run.json, its value now]} for those that differ; None: it is missing."""
        before: dict[str, str] = stored.get("sources", self.digests)  # an earlier release recorded none
        pairs = {name: [before.get(name), self.digests.get(name)] for name in sorted({*before, *self.digests})}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


OTHER_CODE: Final = "other_code"
"""The metric, a text, of a step that ran with other code than the run was begun with."""


def other_code(forced: Sequence[Mapping[str, Any]], step: int) -> str:
    """Name the code of a step that the run was not begun with, each change by its key in `Sources.changes`; empty where there is none.

    `forced` is that of run.json, `step` counts from 1.
    """
    return ", ".join(name for each in forced if step > each["step"] for name in each["changed"])


def forced_in(folder: Path | None) -> list[dict[str, Any]]:
    """Return `forced` in run.json of this folder; empty without either. Raises DataError where run.json is damaged."""
    return read_run(folder / RUN).get("forced", []) if folder is not None and (folder / RUN).exists() else []


SOURCES: Final[ContextVar[Sources | None]] = ContextVar("agl_otel_sources", default=None)
"""The code of the job that runs in this context: run folders that are opened in it record it. None outside of a job."""


def check_run(folder: Path, sources: Sources, fingerprint: Fingerprint | None) -> None:
    """Check, before anything is started, that the run in this folder, if any, can be resumed. Nothing is written.

    `fingerprint`: None if it is not known yet. Raises UsageError with everything that the run was begun with another of, InUseError where
    another process works in the folder, DataError for a damaged run.json.
    """
    if (folder / _LOCK).exists():
        try:
            FileLock.take(folder / _LOCK).close()
        except BlockingIOError:
            raise InUseError(_taken(folder, holder(folder / _LOCK))) from None
        except OSError:
            pass  # RunFolder names what is wrong with it
    if (folder / RUN).exists():
        _differences(folder / RUN, read_run(folder / RUN), sources, fingerprint)


def _differences(
    path: Path, stored: Mapping[str, Any], sources: Sources | None, fingerprint: Fingerprint | None
) -> dict[str, list[str | None]]:
    """Return the changes of code that are forced. Raises UsageError for all other changes, DataError where `stored` is damaged."""
    changed = sources.changes(stored) if sources is not None else {}
    try:
        other = fingerprint.differences(stored) if fingerprint is not None else {}
    except TypeError as error:
        raise damaged_error(path, error) from error
    if changed:
        other.pop(AGENT, None)  # the changes name it, too
    refused = changed if sources is not None and not sources.force else {}
    if other or refused:
        raise UsageError(_refusal(path.parent, other, refused))
    return changed


def _refusal(folder: Path, other: Mapping[str, tuple[Any, Any]], changed: Mapping[str, Sequence[str | None]]) -> str:
    """Return why the run in `folder` is not resumed: options ({name: (value in run.json, value now)}) or code that changed."""
    begun = f"the run in {folder} was begun with "
    options = ", ".join(name + _values(*pair) for name, pair in other.items())
    named = f"another {options}: use the value in run.json, or a new folder" if other else ""
    code = (
        f"other code, and its figures would not all be of one kind ({_told(changed)}): "
        "restore the code, or name a new folder; with --force it goes on, and run.json records since which step"
        if changed
        else ""
    )
    return begun + ". It was also begun with ".join(filter(None, (named, code)))


def _values(was: Any, is_now: Any) -> str:
    """Return both values in brackets; nothing where one of them is long."""
    shown = " ({} in run.json, {} now)".format(*("none" if value is None else json.dumps(value) for value in (was, is_now)))
    return shown if len(shown) <= LONGEST_SHOWN else ""


def _told(changed: Mapping[str, Sequence[str | None]]) -> str:
    return "; ".join(f"{name}: {_shown(was)} was, {_shown(is_now)} is" for name, (was, is_now) in changed.items())


def _taken(folder: Path, pid: str) -> str:
    return f"another process works on the run in {folder} (pid {pid}): wait for its end, or choose another folder"


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value[:SHOWN_DIGITS] if re.fullmatch(r"[0-9a-f]{16,64}", value) else value


def lock_run(folder: Path) -> FileLock:
    """Lock the folder of a run, which is created where it is missing. Raises InUseError, SettingsError."""
    return FileLock.hold(
        folder / _LOCK,
        what=f"the run's folder {folder}",
        taken=lambda pid: _taken(folder, pid),
        other="choose another folder",
    )


class RunFolder:
    """The folder of a run, locked until `close`.

    Args:
        folder: created where it is missing; an existing run is resumed.
        algorithm: its name.
        options: the run's fingerprint, as JSON. A run that was started with others is refused.
        seed: None: the existing run's, or a random one for a new run.
        model: id and commit of a model of the hub (hub.origin_of); it is recorded, and not compared, since `options` has the fingerprint.
        lock: of `lock_run`, for a caller that writes to the folder before; `close` releases it. None: it is taken here.

    Raises UsageError for a folder of another run, InUseError where another process works in it, DataError for a damaged run.json,
    SettingsError where the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        algorithm: str,
        options: Mapping[str, Any],
        seed: int | None = None,
        model: Mapping[str, str] | None = None,
        lock: FileLock | None = None,
    ) -> None:
        self.folder = folder
        place, known = NEW_RUN.get() or (None, "")
        self.run_id = known if folder.absolute() == place else new_run_id(algorithm)
        self.seed = seed if seed is not None else new_seed()
        self._checked = True
        self._lock = lock or lock_run(folder)
        try:
            self._begin(folder / RUN, Fingerprint.of(algorithm, options, seed), model)
        except OSError as error:
            self.close()
            raise SettingsError(f"the run's folder {folder} cannot be written: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    # --- a line for each step

    def metric(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl and flush it to disk. Raises UsageError where the row already has a `checksum`."""
        self.append(METRICS, row)

    def metrics(self, count: int | None) -> list[dict[str, Any]]:
        """Read the first `count` lines of metrics.jsonl (None: all complete ones) and truncate the file after them.

        Raises DataError where lines are missing or damaged.
        """
        return self.rows(METRICS, count)

    # --- another file of lines

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a line to a file of the folder and flush it to disk. Raises what `metric` raises."""
        with disk_full_names(self.folder / name), open_file(self.folder / name, "a") as file:
            file.write(json.dumps(with_checksum(row), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, name: str, count: int | None = None) -> list[dict[str, Any]]:
        """Read the first `count` lines of a file (None: all complete ones) and truncate it after them. Raises DataError as `metrics`."""
        path = self.folder / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        count = sum(line.endswith(b"\n") for line in lines) if count is None else count
        lines = lines[:count]
        rows = [self._row(path, number, line) for number, line in enumerate(lines, 1)]
        if len(rows) < count or not all(line.endswith(b"\n") for line in lines):
            raise DataError(f"{path} has {len(rows)} of the {count} steps that the run has done: restore it, or choose a new folder")
        if path.exists():
            os.truncate(path, sum(map(len, lines)))
        return rows

    def _row(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        try:
            return without_checksum(line, needed=self._checked)
        except ValueError as error:
            raise damaged_error(path, error, line=number) from error

    # --- the folder

    def _begin(self, path: Path, given: Fingerprint, model: Mapping[str, str] | None) -> None:
        code = SOURCES.get()
        recorded = {_MODEL_FIELD: dict(model)} if model is not None else {}
        if not path.exists():
            fields = {"run_id": self.run_id, "algorithm": given.algorithm, "seed": self.seed, "options": given.options}
            write_json(path, with_checksum(fields | recorded | ({"sources": code.digests} if code is not None else {})))
            return
        stored = read_run(path)
        changed = _differences(path, stored, code, given)
        self.run_id, self.seed, self._checked = stored["run_id"], stored["seed"], CHECKSUM in stored
        content = {name: stored[name] for name in (*_RUN_FIELDS, *_CODE_FIELDS, _MODEL_FIELD) if name in stored}
        content |= {"options": given.options, **recorded}  # the same but for an agent that was changed by force
        content |= {"sources": dict(code.digests)} if code is not None else {}
        content |= {"forced": [*stored.get("forced", ()), {"step": self._steps_done(), "changed": changed}]} if changed else {}
        if content != {name: stored[name] for name in stored if name != CHECKSUM}:  # also what was written before it counted as a secret
            write_json(path, with_checksum(content) if self._checked else content)

    def _steps_done(self) -> int:
        """Return the `step` of the last whole line of metrics.jsonl, the number of these lines where it has none."""
        path = self.folder / METRICS
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(self._row(path, len(lines), lines[-1]).get("step", len(lines))) if lines else 0


def folder_of(where: str | Path | RunFolder | None) -> Path | None:
    """Return the path of a run's folder."""
    return where.folder if isinstance(where, RunFolder) else Path(where) if where is not None else None


@contextmanager
def open_run(
    where: str | Path | RunFolder | None,
    *,
    algorithm: str,
    options: Callable[[], Mapping[str, Any]],
    seed: int | None,
    model: Mapping[str, str] | None = None,
) -> Generator[RunFolder | None]:
    """Open the folder of a run for the block; a RunFolder is passed through and stays open. None: a run in memory.

    Raises what RunFolder raises.
    """
    if where is None or isinstance(where, RunFolder):
        yield where
        return
    with closing(RunFolder(Path(where).absolute(), algorithm=algorithm, options=options(), seed=seed, model=model)) as run:
        yield run


@contextmanager
def only_writer(folder: Path, run: RunFolder | None) -> Generator[None]:
    """Lock a folder of weights for the block; one within the folder of `run` is locked by that.

    Two runs would replace each other's versions, between the push of one and its checkpoint, too. Raises InUseError, SettingsError.
    """
    if run is not None and folder.is_relative_to(run.folder.absolute()):
        yield
        return
    remedy = "give each run a weights_dir or a run_dir of its own"
    with writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)  # by the umask: the model server may be another user's
    with FileLock.hold(
        folder / "lock",
        what=f"the folder of weights {folder}",
        taken=lambda pid: f"another run writes its weights to {folder} (pid {pid}): wait for its end, or {remedy}",
        other=remedy,
    ):
        yield


@contextmanager
def run_folder_for(
    algorithm: Algorithm,
    folder: str | Path | None,
    *,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    resources: NamedResources | None = None,
    options: Any = None,
    agent: Any = None,
) -> Generator[None]:
    """Open `folder` as the algorithm's run folder during the block. None: the run has none, unless the algorithm opens its own.

    An algorithm with a `run_dir` attribute gets the folder there, unless it has one already. Any other gets an open RunFolder
    (`Algorithm.get_run_folder`) with run.json, a lock, metrics.jsonl, and the same id and seed when it is started again; which work it
    then skips is up to the algorithm. Raises what RunFolder raises.
    """
    if folder is None or hasattr(algorithm, RUN_DIR):
        if folder is not None and getattr(algorithm, RUN_DIR) is None:
            setattr(algorithm, RUN_DIR, Path(folder))
        yield
        return
    fingerprint = {
        "train": digest_of(items(train)),
        "val": digest_of(items(val)),
        "resources": {name: resource.model_dump() for name, resource in (resources or {}).items()},
        "options": options or {},
        **({AGENT: agent} if agent is not None else {}),
    }
    with closing(RunFolder(Path(folder).absolute(), algorithm=name_of(algorithm), options=fingerprint)) as run:
        algorithm.set_run_folder(run)
        try:
            yield
        finally:
            algorithm.set_run_folder(None)


def name_of(algorithm: Algorithm) -> str:
    """Return the name of the algorithm's function or class."""
    return algorithm.name if isinstance(algorithm, FunctionalAlgorithm) else type(algorithm).__name__


def run_fingerprint(options: Mapping[str, Any], tasks: Sequence[Any], *, model_dir: str | Path, without: Collection[str]) -> dict[str, Any]:
    """Return the fingerprint of a run, as JSON: its options, tasks and model, without the seed.

    `without` names options that may change when the run is resumed. Raises UsageError where `model_dir` holds no model.
    """
    compared = {name: value for name, value in options.items() if name not in without}
    config = options["rollout_config"].model_dump() if options["rollout_config"] is not None else None
    return {**compared, "rollout_config": config, "tasks": digest_of(list(tasks)), "model": model_fingerprint(model_dir)}


def read_run(path: Path) -> dict[str, Any]:
    """Read run.json, including its checksum, if it has one. Raises DataError where it is damaged, after copying it."""
    try:
        content = path.read_bytes()
        fields = without_checksum(content)
        if set(fields) - {*_CODE_FIELDS, _MODEL_FIELD} != {*_RUN_FIELDS}:
            raise ValueError(f"its fields are {', '.join(sorted(fields))}")
        return json.loads(content)
    except ValueError as error:
        raise damaged_error(path, error) from error
