"""Rollouts that a run did not enqueue: all of a mode, or those of a selection, which is the same one when the run is resumed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from agl_otel.algorithms.checked_files import read_checked, with_checksum, write_json
from agl_otel.algorithms.run_folder import RunFolder
from agl_otel.errors import UsageError
from agl_otel.types import AttemptedRollout, Rollout, RolloutMode, RolloutQuery, is_trial
from agl_otel.types.selections import Gone, Selection

PINNED: Final = "selection.json"
"""In the run's folder: name with version, and digest, of the selection that the run was begun with."""
SHOWN: Final = 5
_log = logging.getLogger(__name__)


class OfflineStore(Protocol):
    """The part of `agl_otel.store.Store` with rollouts and selections."""

    async def rollouts(self, query: RolloutQuery) -> Sequence[Rollout | AttemptedRollout]:
        """Return the rollouts that match, with their latest attempts."""
        ...

    async def selection(self, named: str) -> Selection:
        """Return a selection, by NAME or NAME@VERSION."""
        ...

    async def gone(self, selection: Selection) -> list[Gone]:
        """Return its attempts that have been deleted or replaced since."""
        ...


def check_offline(mode: RolloutMode | None, selection: str | None) -> None:
    """Raise UsageError if both say what the offline rollouts are."""
    if mode is not None and selection is not None:
        raise UsageError(f'offline_mode = "{mode}" and selection = "{selection}" both say what to train on: leave one out')


class Offline:
    """The offline rollouts of a run."""

    def __init__(self, store: OfflineStore, mode: RolloutMode | None, selection: Selection | None) -> None:
        self._store, self._mode, self._selection = store, mode, selection

    @classmethod
    async def open(cls, store: OfflineStore, mode: RolloutMode | None, named: str | None, run: RunFolder | None) -> Offline | None:
        """Find the selection that is named, of a resumed run the version with which it was begun; None without mode and name.

        Raises NotFoundError, DataError for a damaged selection, UsageError if the store has another one under the name of the run's.
        """
        if named is None:
            return cls(store, mode, None) if mode is not None else None
        pinned = read_checked(run.folder / PINNED) if run is not None and (run.folder / PINNED).exists() else None
        selection = await store.selection(named if pinned is None else str(pinned["selection"]))
        if pinned is None and run is not None:
            write_json(run.folder / PINNED, with_checksum({"selection": selection.selection, "digest": selection.digest}))
        elif pinned is not None and run is not None and pinned["digest"] != selection.digest:
            raise UsageError(
                f"the run in {run.folder} was begun with a selection {selection.selection} of the digest {pinned['digest'][:12]}, and that "
                f"of this store has {selection.digest[:12]}: resume it on its own store, or choose a new folder"
            )
        _log.info("training on the selection %s, digest %s", selection.selection, selection.digest)
        gone = await store.gone(selection)
        if gone:
            shown = ", ".join(f"{each.rollout_id} ({each.why})" for each in gone[:SHOWN])
            _log.warning("%d of %d attempts of %s are left out: %s", len(gone), len(selection.rows), selection.selection, shown)
        made = cls(store, None, selection)
        if failed := len(selection.rows) - len(gone) - len(await made.rollouts(())):
            _log.warning(
                "%d of %d attempts of %s did not succeed, and are not trained on", failed, len(selection.rows), selection.selection
            )
        return made

    async def rollouts(self, taken: Collection[str]) -> list[Rollout | AttemptedRollout]:
        """Return those that have succeeded and are not in `taken`: of a mode without trials, of a selection in its order."""
        if self._selection is None:
            ended = await self._store.rollouts(RolloutQuery(status_in=["succeeded"]))
            return [each for each in ended if each.mode == self._mode and each.rollout_id not in taken and not is_trial(each)]
        left = {row.rollout_id: row.attempt_id for row in self._selection.rows if row.rollout_id not in taken}
        ended = await self._store.rollouts(RolloutQuery(status_in=["succeeded"], rollout_id_in=list(left)))
        found = {each.rollout_id: each for each in ended if isinstance(each, AttemptedRollout)}
        return [found[each] for each in left if each in found and found[each].attempt.attempt_id == left[each]]

    def __str__(self) -> str:
        return f"of mode {self._mode}" if self._selection is None else f"in the selection {self._selection.selection}"
