"""Which tables may be read where the ClickHouse is a server, on which other people keep other databases. Pure: text in, QueryError out.

The embedded ClickHouse holds nothing but our own tables. On a server the collector's user may see more than readers of traces should:
so ClickHouse itself resolves the query (EXPLAIN QUERY TREE, with its first pass alone), and every table that it names must be of our
database, or one of the system tables that describe rather than report.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.collector.guard import DESCRIBING_TABLES
from agl_otel.errors import QueryError
from agl_otel.traces.engine import DATABASE

TREE: Final = "EXPLAIN QUERY TREE passes = 1 "
_TABLE_NODE: Final = re.compile(r"^ *TABLE id: .*table_name: ([^,\n]+)", re.M)  # greedy: an alias before it may say anything
_QUALIFIED: Final = re.compile(r"[`\"]?(\w+)[`\"]?\.[`\"]?\w")
_OF_DATABASE: Final = re.compile(
    r"(?:TABLES|(?:COLUMNS|FIELDS)\s+(?:FROM|IN)\s+\S+)\s+(?:FROM|IN)\s+[`\"]?(\w+)|DATABASE\s+[`\"]?(\w+)", re.I
)


def check_query_tree(tree: str) -> None:
    """What EXPLAIN QUERY TREE says of one SELECT. Raises QueryError."""
    for name in _TABLE_NODE.findall(tree):
        database, _, table = name.replace("`", "").partition(".")
        if database != DATABASE and not (database == "system" and table in DESCRIBING_TABLES):
            raise QueryError(f"the table {name} is not one of the stored traces ({DATABASE}.*) and is not available here")


def check_fixed(text: str) -> None:
    """A SHOW, DESCRIBE or EXISTS. Raises QueryError."""
    bare = re.sub(r"'[^']*'", "", text)
    named = _QUALIFIED.findall(bare) + [first or second for first, second in _OF_DATABASE.findall(bare)]
    if any(name not in (DATABASE, "system") for name in named):
        raise QueryError(f"only {DATABASE}.* is shown here")
