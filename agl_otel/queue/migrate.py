"""Numbered migrations: which files of sql/migrations a database has, and which it still needs. Additive, and twice is once."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple

from agl_otel.errors import ConflictError


class Migration(NamedTuple):
    """One file of sql/migrations."""

    version: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """All migrations of this release, in order."""
    found = [
        Migration(int(entry.name[:4]), entry.name, entry.read_text(encoding="utf-8"))
        for entry in files("agl_otel.queue").joinpath("sql", "migrations").iterdir()
        if re.fullmatch(r"\d{4}_\w+\.sql", entry.name)
    ]
    return sorted(found)


def pending(applied: int, known: list[Migration], where: str) -> list[Migration]:
    """What a database at version `applied` (0: empty) still needs. Raises ConflictError where it is newer than this release."""
    newest = known[-1].version
    if applied > newest:
        raise ConflictError(
            f"the queue's database {where} has schema version {applied}, but this release of agl-otel knows only up to {newest}: "
            "install the release that wrote it (pip install --upgrade agl-otel), or point AGL_QUEUE_URL or AGL_DATA_DIR elsewhere"
        )
    return [migration for migration in known if migration.version > applied]
