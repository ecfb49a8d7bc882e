"""Creates the tables (sql/schema.sql), and refuses data of another schema version.

Safe to run twice and concurrently: every statement is IF NOT EXISTS. The version is recorded last, in otel.agl_migrations.
"""

from __future__ import annotations

import re
from typing import Any, Final

from agl_otel.errors import ConflictError
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import DATABASE, Engine
from agl_otel.traces.sql import named_query

VERSION: Final = 1
DERIVED: Final = ("Facts", "HasMedia")
"""Columns of otel_traces that follow from others: their DEFAULT computes them where an insert leaves them out."""
_VERSIONS: Final = f"{DATABASE}.agl_migrations"


def create_schema(engine: Engine, *, where: str, cluster: Cluster | None = None) -> bool:
    """Create missing tables, on `cluster` if given. Returns whether this process recorded the version.

    Raises ConflictError if the data at `where` has another version.
    """

    def run(statement: str) -> None:
        for each in cluster.statements(statement) if cluster else [statement]:
            engine.command(each)

    run(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    run(
        f"CREATE TABLE IF NOT EXISTS {_VERSIONS} (Version UInt32, Name String, AppliedAt DateTime64(3) DEFAULT now64(3)) "
        "ENGINE = MergeTree ORDER BY Version SETTINGS fsync_after_insert = 1, min_rows_to_fsync_after_merge = 1, fsync_part_directory = 1"
    )
    found = {int(str(row[0])) for row in engine.select(f"SELECT DISTINCT Version FROM {_VERSIONS}")}
    if found - {VERSION}:
        raise ConflictError(
            f"the traces at {where} have schema {max(found)}, and this release of agl-otel has schema {VERSION}: "
            "use the release that wrote them, or name another place (AGL_DATA_DIR or AGL_CLICKHOUSE_URL)"
        )
    if found:
        return False
    for statement in statements():
        run(statement)
    engine.insert(_VERSIONS, ["Version", "Name"], [f'{{"Version":{VERSION},"Name":"schema"}}\n'.encode()])
    return True


def statements() -> list[str]:
    """The statements of sql/schema.sql, in order."""
    lines = [line for line in named_query("schema").splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";") if part.strip()]


def derived_columns() -> dict[str, Any]:
    """Return what the DEFAULTs of DERIVED say, for who computes these columns instead.

    `facts` are keys of attributes in Facts, `fact_prefix` is that of others; HasMedia tells whether the attribute `messages` has one of the
    texts `media`.
    """
    facts, prefix = _in_schema(r"key IN \((.*?)\)\s+OR startsWith\(key, '(.*?)'\)")
    messages, media = _in_schema(r"multiSearchAny\(SpanAttributes\['(.*?)'\], \[(.*?)\]\)")
    return {"facts": _literals(facts), "fact_prefix": prefix, "messages": messages, "media": _literals(media)}


def _in_schema(pattern: str) -> tuple[str | Any, ...]:
    found = re.search(pattern, named_query("schema"), re.DOTALL)
    assert found is not None  # the schema is ours
    return found.groups()


def _literals(sql: str) -> list[str]:
    return re.findall(r"'(.*?)'", sql)
