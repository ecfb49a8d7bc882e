"""What a run has paid for, by name: results of rollouts and answers of the editor, one JSON line each, on disk before they are used.

A run that is started again on its folder goes through the same program; what the journal knows is not done a second time. So a search
needs no state of its own on disk: it is a function of its options, its seed and these answers.

    run.json        the run's id, its algorithm, its options, its seed
    journal.jsonl   {"name", "digest", "value"}, appended and fsynced; {"forget": [names]} takes some back
    metrics.jsonl   a line for each step, written anew by every start
    best.json       the best candidate so far
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from agl_otel.errors import DataError, InUseError, SettingsError, UsageError

RUN: Final = "run.json"
JOURNAL: Final = "journal.jsonl"
METRICS: Final = "metrics.jsonl"
BEST: Final = "best.json"
_log = logging.getLogger(__name__)


def digest_of(*values: Any) -> str:
    """16 hex characters that stand for these values; equal JSON, equal digest."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Journal:
    """The journal of one run. Without a folder it is kept in memory, and a run that is stopped cannot go on.

    Args:
        folder: made where it is missing; a run that is there is gone on with.
        algorithm: its name.
        options: what decides the course of the run, as JSON. A run that was begun with others is refused.
        seed: None goes on with the run's own, and draws one for a new run.

    Raises UsageError for a folder of another run, InUseError where one works in it, DataError for a damaged journal.
    """

    def __init__(self, folder: Path | None, *, algorithm: str, options: Mapping[str, Any], seed: int | None = None) -> None:
        self.folder = folder
        self.run_id = f"{algorithm}-{uuid.uuid4().hex[:8]}"
        self.seed = seed if seed is not None else uuid.uuid4().int % 2**32
        self.known: dict[str, tuple[str, Any]] = {}
        self._files: list[IO[str]] = []
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock(folder)
                self._begin(folder, algorithm, json.loads(json.dumps(options, default=str)), seed)
            except OSError as error:
                raise SettingsError(f"the run's folder {folder} cannot be written: {error.strerror}") from error
            except BaseException:
                self.close()
                raise

    # --- what was done

    def find(self, name: str, digest: str) -> Any:
        """The value noted under this name for equal inputs; None where there is none."""
        known = self.known.get(name)
        return known[1] if known is not None and known[0] == digest else None

    def note(self, name: str, digest: str, value: Any) -> None:
        """Keep a value; it is on disk when this returns."""
        self.known[name] = (digest, value)
        self._append({"name": name, "digest": digest, "value": value})

    def forget(self, names: Sequence[str]) -> None:
        """Take values back: what they stand for is tried again."""
        for name in names:
            self.known.pop(name, None)
        self._append({"forget": list(names)})

    # --- what is there to be looked at

    def metric(self, row: Mapping[str, Any]) -> None:
        """A line for metrics.jsonl."""
        if self.folder is not None:
            self._metrics.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._metrics.flush()

    def best(self, value: Mapping[str, Any]) -> None:
        """The best so far, for best.json; a reader sees the old one or the new one."""
        if self.folder is not None:
            _write(self.folder / BEST, value)

    def close(self) -> None:
        """Let go of the folder."""
        for file in self._files:
            file.close()
        self._files.clear()

    # --- the folder

    def _lock(self, folder: Path) -> None:
        lock = (folder / "lock").open("w")
        self._files.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"another process works on the run in {folder}: wait for its end, or choose another folder") from None

    def _begin(self, folder: Path, algorithm: str, options: dict[str, Any], seed: int | None) -> None:
        if (folder / RUN).exists():
            begun: dict[str, Any] = json.loads((folder / RUN).read_text())
            other = [name for name in {*options, *begun["options"]} if options.get(name) != begun["options"].get(name)]
            other += ["algorithm"] if begun["algorithm"] != algorithm else []
            other += ["seed"] if seed is not None and begun["seed"] != seed else []
            if other:
                raise UsageError(
                    f"the run in {folder} was begun with another {', '.join(sorted(other))}: give what run.json says, or a new folder"
                )
            self.run_id, self.seed = begun["run_id"], begun["seed"]
        else:
            _write(folder / RUN, {"run_id": self.run_id, "algorithm": algorithm, "seed": self.seed, "options": options})
        self._read(folder / JOURNAL)
        self._journal = (folder / JOURNAL).open("a")
        self._metrics = (folder / METRICS).open("w")
        self._files += [self._journal, self._metrics]

    def _read(self, path: Path) -> None:
        whole, lines = 0, path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("torn")
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise DataError(f"{path}, line {number}, is damaged ({error}): mend or remove it, or choose a new folder") from error
                _log.warning("%s: the last line was torn by the run's end and is cut off", path)
                with path.open("r+b") as file:
                    file.truncate(whole)
            whole += len(line)

    def _take(self, row: Mapping[str, Any]) -> None:
        if "forget" in row:
            for name in row["forget"]:
                self.known.pop(name, None)
        else:
            self.known[row["name"]] = (row["digest"], row["value"])

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.folder is not None:
            self._journal.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())


def _write(path: Path, value: Mapping[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
