"""Shared by commands that read a selection: the option, and which of its rollouts are still there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click

from agl_otel.cli.common import Decorator
from agl_otel.cli.output import counted
from agl_otel.errors import UsageError
from agl_otel.store import Store
from agl_otel.types.selections import Gone, Selection

SHOWN: Final = 5
WHY: Final = {"deleted": "was deleted", "replaced": "has another latest attempt"}
selection_option: Decorator = click.option(
    "--selection", metavar="NAME[@VERSION]", help="Only the attempts of this selection; see `agl-otel select`."
)


class Taken(NamedTuple):
    """A selection, and what of it is gone."""

    selection: Selection
    gone: list[Gone]

    @property
    def ids(self) -> list[str]:
        """The rollouts that are left, in order."""
        out = {each.rollout_id for each in self.gone}
        return [rollout_id for rollout_id in self.selection.rollout_ids if rollout_id not in out]

    def report(self) -> dict[str, Any]:
        """Return what a command reports of it as JSON."""
        found = self.selection
        return {
            "selection": found.selection,
            "digest": found.digest,
            "attempts": len(found.rows),
            "gone": {each.rollout_id: each.why for each in self.gone},
        }


async def taken_selection(store: Store, named: str) -> Taken:
    """Return a selection, by NAME or NAME@VERSION. Raises NotFoundError, DataError; UsageError if nothing of it is left."""
    selection = await store.selection(named)
    taken = Taken(selection, await store.gone(selection))
    if not taken.ids:
        raise UsageError(f"nothing is left of the selection {selection.selection}: {gone_lines(taken.report())[0]}")
    return taken


def gone_lines(report: Mapping[str, Any]) -> list[str]:
    """Name the attempts of a selection (Taken.report) that are gone; no line if none is."""
    gone: dict[str, str] = report["gone"]
    if not gone:
        return []
    shown = [f"{rollout_id} {WHY[why]}" for rollout_id, why in list(gone.items())[:SHOWN]]
    more = [f"and {len(gone) - SHOWN:,} more"] if len(gone) > SHOWN else []
    return [f"{counted(len(gone), 'attempt')} of {report['selection']} left out, because of changes since: {'; '.join([*shown, *more])}"]


def check_one_of(selection: str | None, **others: Any) -> None:
    """Raise UsageError if options are given with --selection that name rollouts, too."""
    if selection is not None and (given := [name for name, value in others.items() if value]):
        raise UsageError(f"--selection and --{given[0]} both say which rollouts to take: give one")
