"""The queue's tables, in one file for each engine (sql/schema_*.sql), and their common version."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from agl_otel.errors import ConflictError

VERSION: Final = 1


def statements(engine: str) -> Iterator[str]:
    """Yield the statements that create the tables of `engine` ("sqlite", "postgres"), in order, without comments."""
    text = files("agl_otel.queue").joinpath("sql", f"schema_{engine}.sql").read_text(encoding="utf-8")
    lines = (line.split("--")[0].rstrip() for line in text.splitlines())
    yield from filter(None, (statement.strip() for statement in "\n".join(lines).split(";")))


def check_version(found: int, where: str) -> None:
    """Raise ConflictError if the tables at `where` are not of this release's version."""
    if found != VERSION:
        raise ConflictError(
            f"the queue's database {where} has schema version {found}, and this release of agl-otel has {VERSION}: "
            "install the release that wrote it, or point AGL_QUEUE_URL or AGL_DATA_DIR elsewhere"
        )
