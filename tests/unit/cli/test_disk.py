"""Disk usage of a data directory by part."""

from __future__ import annotations

from pathlib import Path

from agl_otel.cli.disk import sizes_of


def test_disk_usage_is_summed_by_part(tmp_path: Path) -> None:
    for name in ("queue.db", "queue.db-wal", "traces/store/a/data.bin", "wal/1.log", "stack.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10_000)
    sizes = sizes_of(tmp_path)
    assert set(sizes) == {"queue.db", "traces", "wal", "the rest"}
    assert sizes["queue.db"] >= 20_000 and sizes["traces"] >= 10_000
