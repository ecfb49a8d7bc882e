"""Retention of rows: by the day of their receipt, whatever their own times; whole parts are dropped.

The setting decides: every start compares it with the tables, and alters only tables that differ.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.traces.cluster import LOCAL, Cluster
from agl_otel.traces.engine import DATABASE, Engine

_RECEIVED: Final = {"ReceivedAt": "toDateTime(ReceivedAt)", "ReceivedDay": "ReceivedDay"}
_TTL: Final = re.compile(r" TTL \S.*? \+ toIntervalDay\((\d+)\)")


def apply_retention(engine: Engine, days: int, cluster: Cluster | None = None) -> list[str]:
    """Keep rows for `days` days (0: for ever). Returns the altered tables. Raises ClickHouseError."""
    found = engine.select(
        "SELECT t.name, c.name, t.engine_full FROM system.columns AS c INNER JOIN system.tables AS t ON c.table = t.name "
        "WHERE c.database = {db:String} AND t.database = {db:String} AND c.name IN ('ReceivedAt', 'ReceivedDay') "
        "AND t.engine LIKE '%MergeTree' ORDER BY t.name",
        {"db": DATABASE},
    )
    altered: list[str] = []
    for table, column, definition in ((str(row[0]), str(row[1]), str(row[2])) for row in found):
        ttl = _TTL.search(definition)
        if (int(ttl[1]) if ttl else 0) == days:
            continue
        change = f"MODIFY TTL {_RECEIVED[column]} + toIntervalDay({days})" if days else "REMOVE TTL"
        statement = f"ALTER TABLE {DATABASE}.{table.removesuffix(LOCAL)} {change}"
        for each in cluster.statements(statement) if cluster else [statement]:
            engine.command(each)
        altered.append(table)
    return altered
