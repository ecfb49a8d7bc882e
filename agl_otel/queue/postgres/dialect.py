"""The differences of PostgreSQL's SQL: three idioms are rewritten, and sql/postgres.sql holds the queries that lock rows.

Operations are written for one transaction at a time. Here several run concurrently (READ COMMITTED), so rows that a decision depends on
are read FOR UPDATE; the lock on a rollout's row covers its attempts too. Where two transactions could insert the same row, a unique
index makes the second one fail and run again.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.queue.statements import FILES, Statements

_IDIOMS: Final = (
    (re.compile(r" INDEXED BY \w+"), ""),
    (re.compile(r"IN \(SELECT value FROM json_each\(:(\w+)\)\)"), r"= ANY(ARRAY(SELECT json_array_elements_text(:\1::json)))"),
    (re.compile(r"instr\(([\w.]+), :(\w+)\)"), r"strpos(\1, :\2)"),
)
_PARAMETER: Final = re.compile(r"(?<!:):(\w+)")


def statements() -> Statements:
    """Return the named queries in psycopg's syntax."""
    return Statements((*FILES, "postgres.sql"), rewrite=_rewrite)


def _rewrite(sql: str) -> str:
    for idiom, replacement in _IDIOMS:
        sql = idiom.sub(replacement, sql)
    return _PARAMETER.sub(r"%(\1)s", sql)
