"""What differs in PostgreSQL's SQL: three idioms are rewritten, sql/postgres.sql holds the queries that lock rows.

Operations were written for one transaction at a time. Here several run at once (READ COMMITTED), so whatever a decision rests on is
read FOR UPDATE: the rollout's row stands for all that belongs to it. What two could insert at once has a unique index, and the second
one runs again.
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
    """The named queries for psycopg."""
    return Statements((*FILES, "postgres.sql"), rewrite=_rewrite)


def _rewrite(sql: str) -> str:
    for idiom, replacement in _IDIOMS:
        sql = idiom.sub(replacement, sql)
    return _PARAMETER.sub(r"%(\1)s", sql)
