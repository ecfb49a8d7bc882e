"""The path in an SQLite AGL_QUEUE_URL: the same file for the queue, its backup and its deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.queue.sqlite import sqlite_path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:////data/queue.db", Path("/data/queue.db")),
        ("sqlite:///queue.db", Path("queue.db")),
        ("sqlite:///", None),
        ("postgresql://host/queue", None),
    ],
)
def test_a_url_of_sqlite_names_a_file(url: str, path: Path | None) -> None:
    assert sqlite_path(url) == path
