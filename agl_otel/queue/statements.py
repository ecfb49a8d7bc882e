"""The named queries of sql/*.sql, and the composition of WHERE and ORDER BY from a user's filter and page.

An engine with another dialect adds a file that overrides single queries and a function that rewrites idioms; the rest of the SQL is shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from operator import itemgetter
from typing import Any, Final

from agl_otel.errors import UsageError
from agl_otel.queue.rows import COLUMNS, Row

FILES: Final = ("rollouts.sql", "attempts.sql", "others.sql")
ALL_ROWS: Final = 1 << 62
_PARAMETER = re.compile(r"(?<!:):(\w+)")
_NAME = re.compile(r"^-- name: (\w+)\n-- (.+)\n", re.MULTILINE)


class Statements:
    """Named SQL texts."""

    def __init__(self, names: Sequence[str] = FILES, *, rewrite: Callable[[str], str] = str) -> None:
        self._rewrite = rewrite
        self._texts: dict[str, str] = {}
        self.descriptions: dict[str, str] = {}
        self._positional: dict[tuple[str, type], tuple[str, Callable[[Any], Sequence[object]]]] = {}
        for name in names:
            self._load(files("agl_otel.queue").joinpath("sql", name).read_text(encoding="utf-8"))

    def _load(self, text: str) -> None:
        marks = [*_NAME.finditer(text)]
        for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
            body = text[mark.end() : end].strip().removesuffix(";")
            for placeholder, columns in COLUMNS.items():
                body = body.replace(placeholder, columns)
            self._texts[mark[1]] = self._rewrite(body)
            self.descriptions[mark[1]] = mark[2]

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def positional(self, name: str, example: Row | Mapping[str, object]) -> tuple[str, Callable[[Any], Sequence[object]]]:
        """Return the query `name` with numbered parameters, and a function that takes their values, in order, from a row like `example`.

        SQLite binds numbered parameters in half the time.
        """
        kind = type(example)
        found = self._positional.get((name, kind))
        if found is None:
            names = [*dict.fromkeys(_PARAMETER.findall(self[name]))]
            sql = _PARAMETER.sub(lambda mark: f"?{names.index(mark[1]) + 1}", self[name])
            keys = [example._fields.index(each) for each in names] if isinstance(example, tuple) else names
            found = self._positional[name, kind] = (sql, itemgetter(*keys) if len(keys) > 1 else lambda row: (row[keys[0]],))
        return found

    def paged(self, name: str, where: Sequence[str], page: str = "", *, any_of: bool = False, always: Sequence[str] = ()) -> str:
        """Return the query `name` with its conditions and page: `where` joined by AND (or OR), `always` by AND; `page` is of page_clause.

        A query that applies the page in a subquery ends with /*order*/.
        """
        conditions = [f"({(' OR ' if any_of else ' AND ').join(self[w] for w in where)})"] if where else []
        conditions += [self[w] for w in always]
        clause = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        return self[name].replace("/*where*/", clause).replace("/*page*/", page).replace("/*order*/", page.partition(" LIMIT ")[0])


def page_clause(
    sort_by: str, sortable: Mapping[str, str], *, default: str, descending: bool, limit: int, offset: int, nulls: bool = True
) -> str:
    """Return ORDER BY … LIMIT … OFFSET …; `sortable` maps the fields that a user may name to columns, `default` breaks ties.

    For a field that is never null, pass `nulls` False to omit NULLS FIRST/LAST: PostgreSQL uses an index only in its own order of nulls.

    Raises UsageError for a field that is not sortable.
    """
    direction = "DESC" if descending else "ASC"
    if sort_by and sort_by not in sortable:
        raise UsageError(f"cannot sort by {sort_by!r}: use one of {', '.join(sorted(sortable))}")
    place = (" NULLS LAST" if descending else " NULLS FIRST") if nulls else ""  # SQLite's default
    order = f"{sortable[sort_by]} {direction}{place}, {default} {direction}" if sort_by else f"{default} {direction}"
    if limit <= 0 and offset <= 0:
        return f"ORDER BY {order}"
    return f"ORDER BY {order} LIMIT {limit if limit > 0 else ALL_ROWS:d} OFFSET {max(offset, 0):d}"
