"""The part of the store for selections.

A selection is a set of resources, so that everything that knows the stack can name it, and each version of it stays. `rows` is its table as
canonical JSON lines, `made` says how it was made, and has the digest of the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agl_otel.adapters.batches import digest_of, gone, lines_of, rows_in
from agl_otel.errors import DataError, NotFoundError, UsageError
from agl_otel.store.resources import Resources
from agl_otel.types import AttemptedRollout, PromptTemplate, ResourcesUpdate, Rollout
from agl_otel.types.selections import NAMED, Gone, Selected, Selection

PREFIX: Final = "selection-"
"""How the ids of their sets begin."""
MOST: Final = 100_000
"""Attempts of a selection: a third of the largest message to the queue."""
ASKED: Final = 10_000  # rollouts in one query of the queue
_ROWS, _MADE, _DIGEST = "rows", "made", "digest"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Selections(Resources):
    """Selections with versions."""

    async def selection(self, named: str) -> Selection:
        """Return a selection by NAME, its current version, or NAME@VERSION. Raises NotFoundError, DataError for a damaged one."""
        if not re.fullmatch(NAMED, named):
            raise UsageError(f"{named[:120]!r} names no selection: write NAME, or NAME@VERSION")
        name, _, version = named.partition("@")
        given = await (await self._queue()).get_resources(PREFIX + name, version=int(version) if version else None)
        if given is None:
            raise NotFoundError(f"there is no selection {named!r}: `agl-otel select {name} --all` makes one of all attempts")
        return _selection_of(given)

    async def put_selection(self, name: str, rows: Sequence[Selected], made: Mapping[str, Any]) -> Selection:
        """Store a selection, as the next version if there is one of this name. Raises UsageError."""
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:120]!r} is no name for a selection: use 1 to 100 letters, digits, . _ -, the first no sign")
        if not rows:
            raise UsageError("the selection would have no attempt")
        if len(rows) > MOST:
            raise UsageError(f"the selection would have {len(rows):,} attempts, and {MOST:,} are the most: name fewer by --top")
        lines = lines_of(rows)
        head = json.dumps({**made, _DIGEST: digest_of(lines)}, indent=1, ensure_ascii=False, sort_keys=True)
        texts = {_ROWS: lines, _MADE: head}
        templates = {key: PromptTemplate(template=text, engine="jinja") for key, text in texts.items()}
        return _selection_of(await self.publish(templates, resources_id=PREFIX + name, aside=True))

    async def gone(self, selection: Selection) -> list[Gone]:
        """Return its attempts that have been deleted or replaced since."""
        queue, rollouts = await self._queue(), dict[str, Rollout | AttemptedRollout]()
        ids = selection.rollout_ids
        for start in range(0, len(ids), ASKED):
            page = await queue.query_rollouts(rollout_id_in=ids[start : start + ASKED])
            rollouts |= {rollout.rollout_id: rollout for rollout in page}
        return gone(selection.rows, rollouts)


def _selection_of(given: ResourcesUpdate) -> Selection:
    name = given.resources_id.removeprefix(PREFIX)
    where = f"the selection {name}@{given.version} (resources {given.resources_id})"
    texts = {key: each.template for key, each in given.resources.items() if isinstance(each, PromptTemplate)}
    try:
        made: dict[str, Any] = json.loads(texts[_MADE])
        lines, digest = texts[_ROWS], str(made.pop(_DIGEST))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{where} is no selection: {error!r}; select again under its name") from None
    rows = rows_in(lines, digest, where)
    return Selection(selection=f"{name}@{given.version}", name=name, version=given.version, digest=digest, made=made, rows=rows)
