"""Numbered, additive migrations: safe to run twice and by two processes at once, because every statement is IF NOT EXISTS.

Which ones ran is recorded in otel.agl_migrations. Data written by a newer version is refused, not guessed at.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from agl_otel.errors import ConflictError
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import DATABASE, Engine

_HERE: Final = Path(__file__).parent
OTLP_ROWS: Final = f"{DATABASE}.otlp_rows"
"""What is inserted here as protobuf becomes rows of otel_traces."""
OTLP_ROWS_SCHEMA: Final = _HERE / "schema" / "otlp_rows.proto"
_TABLE: Final = f"{DATABASE}.agl_migrations"
REFILLS: Final = ("refill_trace_id_ts", "refill_rollout_summary", "refill_services")
"""Named queries that write again what the materialized views derive from one batch."""


@cache
def named_query(name: str) -> str:
    """The text of sql/NAME.sql."""
    return (_HERE / "sql" / f"{name}.sql").read_text()


def migrations() -> list[tuple[int, str, list[str]]]:
    """All that this version knows, in order: (number, name, statements)."""
    found: list[tuple[int, str, list[str]]] = []
    for entry in sorted((_HERE / "schema").glob("*.sql")):
        number, name = entry.stem.split("_", 1)
        found.append((int(number), name, _statements(entry.read_text())))
    return found


def migrate(engine: Engine, *, where: str, cluster: Cluster | None = None) -> list[int]:
    """Bring the database to this version's schema, on `cluster` if there is one; returns the numbers that were applied now.

    Raises ConflictError where the data at `where` was written by a newer version.
    """

    def run(statement: str) -> None:
        for each in cluster.statements(statement) if cluster else [statement]:
            engine.command(each)

    run(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    run(
        f"CREATE TABLE IF NOT EXISTS {_TABLE} (Version UInt32, Name String, AppliedAt DateTime64(3) DEFAULT now64(3)) "
        "ENGINE = MergeTree ORDER BY Version SETTINGS fsync_after_insert = 1, fsync_part_directory = 1"
    )
    done = {int(str(row[0])) for row in engine.select(f"SELECT DISTINCT Version FROM {_TABLE}")}
    known = migrations()
    newest = max(number for number, _, _ in known)
    if done and max(done) > newest:
        raise ConflictError(
            f"{where} was written by a newer agl-otel (schema {max(done)}; this version knows {newest}): "
            "upgrade agl-otel, or use another data directory"
        )
    applied: list[int] = []
    for number, name, statements in known:
        if number in done:
            continue
        for statement in statements:
            run(statement)
        engine.insert(_TABLE, ["Version", "Name"], f'{{"Version":{number},"Name":"{name}"}}\n'.encode())
        applied.append(number)
    return applied


def _statements(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";") if part.strip()]
