"""The journal of a prompt search: results of rollouts and answers of the editor by name, each on disk before it is used.

A resumed run repeats the same program and takes recorded results from the journal, so a search needs no other state on disk: it is a
function of its options, its seed and these results. A lost NOTE record costs its work again; after a lost FORGET record the next start
fails like the last one.

    run.json, metrics.jsonl   see run_folder.py; every start rewrites the metrics
    journal.frames            framed records (framed.py), fsynced: NOTE {"name", "digest", "value"}, FORGET [names] deletes values
    best.json                 the best candidate so far
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.checked_files import digest_of, write_json
from agl_otel.algorithms.run_folder import BEST, RunFolder, new_run_id, new_seed
from agl_otel.errors import SettingsError
from agl_otel.service.framed import Frame, FramedFile

__all__ = ["BEST", "JOURNAL", "Journal", "digest_of"]

JOURNAL: Final = "journal.frames"
NOTE: Final = 1
FORGET: Final = 2


class Journal:
    """The journal of one run. Without a folder it is in memory, and a stopped run cannot be resumed.

    Args:
        folder: created where it is missing; an existing run is resumed.
        algorithm: its name.
        options: the run's fingerprint, as JSON. A run that was started with others is refused.
        seed: None: the existing run's, or a random one for a new run.

    Raises UsageError for a folder of another run, InUseError where another process works in it, DataError for a damaged run.json,
    SettingsError where the folder cannot be written.
    """

    def __init__(self, folder: Path | None, *, algorithm: str, options: Mapping[str, Any], seed: int | None = None) -> None:
        self.folder = folder
        self.known: dict[str, tuple[str, Any]] = {}
        self._file: FramedFile | None = None
        self._run = RunFolder(folder, algorithm=algorithm, options=options, seed=seed) if folder is not None else None
        if self._run is None or folder is None:
            self.run_id, self.seed = new_run_id(algorithm), seed if seed is not None else new_seed()
            return
        self.run_id, self.seed = self._run.run_id, self._run.seed
        try:
            self._run.metrics(0)
            self._file, entries = FramedFile.mended(folder / JOURNAL, describe=_describe)
            for entry in entries:
                if isinstance(entry, Frame):
                    self._apply(entry.kind, json.loads(entry.payload))
        except OSError as error:
            self.close()
            raise SettingsError(f"the run's folder {folder} cannot be written: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    # --- recorded values

    def find(self, name: str, digest: str) -> Any:
        """Return the value recorded under this name for inputs with this digest; None where there is none."""
        known = self.known.get(name)
        return known[1] if known is not None and known[0] == digest else None

    def note(self, name: str, digest: str, value: Any) -> None:
        """Record a value durably."""
        self._append(NOTE, {"name": name, "digest": digest, "value": value})

    def forget(self, names: Sequence[str]) -> None:
        """Delete values, so that the work behind them is repeated."""
        self._append(FORGET, list(names))

    # --- output for readers

    def metric(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self._run is not None:
            self._run.metric(row)

    def best(self, value: Mapping[str, Any]) -> None:
        """Write the best candidate so far to best.json, atomically."""
        if self.folder is not None:
            write_json(self.folder / BEST, value)

    def close(self) -> None:
        """Close the files and release the folder's lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            self._run.close()

    # --- the folder

    def _apply(self, kind: int, value: Any) -> None:
        if kind == NOTE:
            self.known[value["name"]] = (value["digest"], value["value"])
        elif kind == FORGET:
            for name in value:
                self.known.pop(name, None)

    def _append(self, kind: int, value: Any) -> None:
        self._apply(kind, value)
        if self._file is not None:
            self._file.write([(kind, json.dumps(value, ensure_ascii=False).encode())])
            self._file.sync()


def _describe(kind: int | None, payload: bytes) -> str:
    """Return the beginning of a recorded value, for reports of damage."""
    return "" if kind == FORGET else payload[:80].decode(errors="replace")
