"""Creates the tables (sql/schema.sql), and refuses data of another schema version.

Safe to run twice and concurrently: every statement is IF NOT EXISTS. The version is recorded last, in otel.agl_migrations.
"""

from __future__ import annotations

from typing import Final

from agl_otel.errors import ConflictError
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import DATABASE, Engine
from agl_otel.traces.sql import named_query

VERSION: Final = 1
OTLP_ROWS: Final = f"{DATABASE}.otlp_rows"
"""The table for inserts as protobuf, which become rows of otel_traces."""
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
    engine.insert(_VERSIONS, ["Version", "Name"], f'{{"Version":{VERSION},"Name":"schema"}}\n'.encode())
    return True


def statements() -> list[str]:
    """The statements of sql/schema.sql, in order."""
    lines = [line for line in named_query("schema").splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";") if part.strip()]
