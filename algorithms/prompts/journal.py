"""What a run has paid for, by name: results of rollouts and answers of the editor, one JSON line each, on disk before they are used.

A run that is started again on its folder goes through the same program; what the journal knows is not done a second time. So a search
needs no state of its own on disk: it is a function of its options, its seed and these answers.

    run.json, metrics.jsonl   run_folder.py; the metrics are written anew by every start
    journal.jsonl             {"name", "digest", "value"}, appended and fsynced; {"forget": [names]} takes some back
    best.json                 the best candidate so far
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from agl_otel.algorithms.run_folder import RunFolder, digest_of, new_run_id, new_seed, write_json
from agl_otel.errors import DataError

__all__ = ["BEST", "JOURNAL", "Journal", "digest_of"]

JOURNAL: Final = "journal.jsonl"
BEST: Final = "best.json"
_log = logging.getLogger(__name__)


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
        self.known: dict[str, tuple[str, Any]] = {}
        self._file: IO[str] | None = None
        self._run = RunFolder(folder, algorithm=algorithm, options=options, seed=seed) if folder is not None else None
        if self._run is None or folder is None:
            self.run_id, self.seed = new_run_id(algorithm), seed if seed is not None else new_seed()
            return
        self.run_id, self.seed = self._run.run_id, self._run.seed
        try:
            self._run.metrics(0)
            self._read(folder / JOURNAL)
            self._file = (folder / JOURNAL).open("a")
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
        if self._run is not None:
            self._run.metric(row)

    def best(self, value: Mapping[str, Any]) -> None:
        """The best so far, for best.json; a reader sees the old one or the new one."""
        if self.folder is not None:
            write_json(self.folder / BEST, value)

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            self._run.close()

    # --- the folder

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
        if self._file is not None:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
