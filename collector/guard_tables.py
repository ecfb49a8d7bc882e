"""Decide which tables may be read on a ClickHouse server that also holds other users' databases. Pure: text in, QueryError out.

The embedded ClickHouse holds only our own tables. On a server the collector's user may see more than readers of traces should. So
ClickHouse itself resolves the query (EXPLAIN QUERY TREE, its first pass only), and every table in the result must be in our database,
or be a system table that describes rather than reports.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.collector.guard import DESCRIBING_TABLES
from agl_otel.errors import QueryError
from agl_otel.traces.engine import DATABASE

TREE: Final = "EXPLAIN QUERY TREE passes = 1 "
_TABLE_NODE: Final = re.compile(r"^ *TABLE id: .*table_name: ([^,\n]+)", re.M)  # greedy: an alias before it may contain any text
_QUALIFIED: Final = re.compile(r"[`\"]?(\w+)[`\"]?\.[`\"]?\w")
_OF_DATABASE: Final = re.compile(
    r"(?:TABLES|(?:COLUMNS|FIELDS)\s+(?:FROM|IN)\s+\S+)\s+(?:FROM|IN)\s+[`\"]?(\w+)|DATABASE\s+[`\"]?(\w+)", re.I
)


def check_query_tree(tree: str) -> None:
    """Check the EXPLAIN QUERY TREE output of one SELECT. Raises QueryError."""
    for name in _TABLE_NODE.findall(tree):
        database, _, table = name.replace("`", "").partition(".")
        if database != DATABASE and not (database == "system" and table in DESCRIBING_TABLES):
            raise QueryError(f"the table {name} is not one of the stored traces ({DATABASE}.*) and is not available here")


def check_fixed(text: str) -> None:
    """Check a SHOW, DESCRIBE or EXISTS. Raises QueryError."""
    bare = re.sub(r"'[^']*'", "", text)
    named = _QUALIFIED.findall(bare) + [first or second for first, second in _OF_DATABASE.findall(bare)]
    if any(name not in (DATABASE, "system") for name in named):
        raise QueryError(f"only {DATABASE}.* is shown here")
