"""Recovery of batches in doubt that may end the collector each time they are tried: prevents a crash loop.

The file trying.json in the log's folder names the batch during a try and is updated or deleted after it, whatever the outcome. A start that
finds the file therefore follows a process that died during a try, whether by kill -9 or for lack of memory. If a start has died on a batch,
each of its requests is tried alone, a piece of its rows at a time. A request on which DEATHS starts have died alone becomes a dead letter
(dead_letters.py) with its reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from agl_otel.collector.journal import Batch, Member
from agl_otel.collector.store_batch import BatchStore
from agl_otel.service.framed import write_private

FILE: Final = "trying.json"
DEATHS: Final = 2
"""Number of starts that may die while they try a request alone; one death may be an unrelated kill -9."""
_logger = logging.getLogger(__name__)


@dataclass
class _Try:
    batch: int
    apart: bool = False
    """Whether its requests are tried alone."""
    at: int | None = None
    """Log position of the request that is being tried alone."""
    deaths: dict[str, int] = field(default_factory=dict[str, int])
    """{log position: number of starts that died on it}."""
    aside: list[int] = field(default_factory=list[int])
    """Log positions of the requests that became dead letters."""


class Recovery:
    """Stores batches in doubt through `store`; `directory` is the log's folder. Runs in the writer's thread."""

    def __init__(self, store: BatchStore, directory: Path) -> None:
        self._store = store
        self._path = directory / FILE
        self._try = self._load()

    def store(self, batch: Batch, members: Sequence[Member]) -> None:
        """Insert the missing rows of a batch. Raises ClickHouseError; the caller tries again."""
        if self._try is None or self._try.batch != batch.batch_id:
            self._try = _Try(batch.batch_id)
        now = self._try
        if now.apart:
            _logger.warning("recovery: a start has died on batch %d: its %d requests are tried alone", batch.batch_id, len(members))
            self._store_one_by_one(batch, members, now)
        else:
            with self._noted(now):
                self._store.store(batch, members, in_doubt=True)
        self._try = None
        self._path.unlink(missing_ok=True)

    def _store_one_by_one(self, batch: Batch, members: Sequence[Member], now: _Try) -> None:
        for member in members:
            position = member[0]
            if position in now.aside:
                continue
            if (deaths := now.deaths.get(str(position), 0)) >= DEATHS:
                self._store.refuse(member, f"{deaths} starts of the collector died while they stored it alone")
                now.aside.append(position)
                self._save(now)
                continue
            now.at = position
            with self._noted(now):
                self._store.store_alone(batch, members, position)
        self._store.refill(batch)

    @contextmanager
    def _noted(self, now: _Try) -> Generator[None]:
        """Keep the try noted on disk while the block runs, so that the next start knows of a death in it."""
        self._save(now)
        try:
            yield
        finally:
            now.at = None
            if now.apart:
                self._save(now)
            else:
                self._path.unlink(missing_ok=True)

    def _save(self, now: _Try) -> None:
        try:
            write_private(new := self._path.with_suffix(".new"), json.dumps(asdict(now)).encode())
            new.replace(self._path)
        except OSError as error:  # go on without the note: a full disk must not stop the inserts that would free space
            _logger.warning("recovery: %s cannot be written: %s", self._path, error)

    def _load(self) -> _Try | None:
        """Return the try during which the previous start died, or None."""
        try:
            left = _Try(**json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        if left.at is not None:
            left.deaths[str(left.at)] = left.deaths.get(str(left.at), 0) + 1
        left.apart, left.at = True, None
        return left
