"""What differs in PostgreSQL's SQL: three idioms and the types are rewritten, sql/postgres.sql holds the queries that lock rows.

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
_TYPES: Final = (
    (re.compile(r"\bINTEGER\b"), "BIGINT"),
    (re.compile(r"\bREAL\b"), "DOUBLE PRECISION"),
    (re.compile(r"\bTEXT\b"), 'TEXT COLLATE "C"'),  # sorted by code point, as SQLite does
    (re.compile(r"\) WITHOUT ROWID"), ")"),
)
_ONLY_HERE: Final = "-- postgres: "


def statements() -> Statements:
    """The named queries for psycopg."""
    return Statements((*FILES, "postgres.sql"), rewrite=_rewrite)


def _rewrite(sql: str) -> str:
    for idiom, replacement in _IDIOMS:
        sql = idiom.sub(replacement, sql)
    return _PARAMETER.sub(r"%(\1)s", sql)


def schema(sql: str) -> str:
    """A migration of sql/migrations: other type names, and the lines that begin with `-- postgres: `."""
    lines = [line.removeprefix(_ONLY_HERE) if line.startswith(_ONLY_HERE) else line.split("--")[0].rstrip() for line in sql.splitlines()]
    text = "\n".join(line for line in lines if line)
    for ours, theirs in _TYPES:
        text = ours.sub(theirs, text)
    return text
