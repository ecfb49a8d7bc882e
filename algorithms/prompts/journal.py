"""The journal of a prompt search: results of rollouts and answers of the editor by name, each on disk before it is used.

A resumed run repeats the same program and takes recorded results from the journal, so a search needs no other state on disk: it is a
function of its options, its seed and these results. A lost NOTE record costs its work again; after a lost FORGET record the next start
fails like the last one.

    run.json, metrics.jsonl   run_folder.py; the metrics are written anew by every start
    journal.frames            framed records (framed.py), fsynced: NOTE {"name", "digest", "value"}, FORGET [names] takes some back
    best.json                 the best candidate so far
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.run_folder import RunFolder, digest_of, new_run_id, new_seed, write_json
from agl_otel.errors import SettingsError
from agl_otel.service.framed import Frame, FramedFile

__all__ = ["BEST", "JOURNAL", "Journal", "digest_of"]

JOURNAL: Final = "journal.frames"
BEST: Final = "best.json"
NOTE: Final = 1
FORGET: Final = 2


class Journal:
    """The journal of one run. Without a folder it is kept in memory, and a run that is stopped cannot go on.

    Args:
        folder: made where it is missing; a run that is there is gone on with.
        algorithm: its name.
        options: what decides the course of the run, as JSON. A run that was begun with others is refused.
        seed: None goes on with the run's own, and draws one for a new run.

    Raises UsageError for a folder of another run, InUseError where one works in it, SettingsError where it cannot be written.
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
                    self._take(entry.kind, json.loads(entry.payload))
        except OSError as error:
            self.close()
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
        self._append(NOTE, {"name": name, "digest": digest, "value": value})

    def forget(self, names: Sequence[str]) -> None:
        """Take values back: what they stand for is tried again."""
        self._append(FORGET, list(names))

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

    def _take(self, kind: int, value: Any) -> None:
        if kind == NOTE:
            self.known[value["name"]] = (value["digest"], value["value"])
        elif kind == FORGET:
            for name in value:
                self.known.pop(name, None)

    def _append(self, kind: int, value: Any) -> None:
        self._take(kind, value)
        if self._file is not None:
            self._file.write([(kind, json.dumps(value, ensure_ascii=False).encode())])
            self._file.sync()


def _describe(kind: int | None, payload: bytes) -> str:
    """The beginning of what was noted."""
    return "" if kind == FORGET else payload[:80].decode(errors="replace")
