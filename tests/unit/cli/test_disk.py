"""When a disk will be full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agl_otel.cli.disk import Forecast, forecast, outlook, sizes_of

GIB = 1 << 30


def of(**given: Any) -> Forecast:
    known: dict[str, Any] = {
        "traces_bytes": 10 * GIB,
        "rows": 1000,
        "received": (0, 100),
        "free": 11 * GIB,
        "reserve": GIB,
        "retention_days": 0,
    }
    return forecast(**{**known, **given})


def test_it_is_full_when_what_came_in_a_day_has_used_the_room_above_the_reserve() -> None:
    found = of()  # 100 rows a day are 1 GiB a day, and 10 GiB are left
    assert (found.bytes_per_day, found.full_in_seconds, found.kept_bytes) == (GIB, 10 * 86400.0, None)
    assert "full in 10.0 days" in outlook(found, 0, embedded=True) and "set retention_days" in outlook(found, 0, embedded=True)


def test_the_last_hour_counts_where_something_came_in_it() -> None:
    assert of(received=(100, 100)).full_in_seconds == 10 * 3600.0
    assert of(free=GIB // 2).full_in_seconds == 0.0


def test_with_a_retention_that_fits_it_is_never_full() -> None:
    assert of(retention_days=15) == Forecast(GIB, None, 15 * GIB)
    assert of(retention_days=30).full_in_seconds == 10 * 86400.0
    assert "keeps about 15.0 GiB" in outlook(of(retention_days=15), 15, embedded=True)
    assert "lower retention_days" in outlook(of(retention_days=30), 30, embedded=True)


def test_where_nothing_comes_nothing_grows() -> None:
    assert of(received=(0, 0)).full_in_seconds is None and of(rows=0, received=(0, 0)).bytes_per_day == 0.0
    assert "nothing grows" in outlook(of(received=(0, 0)), 0, embedded=True)


def test_on_a_server_its_disk_counts() -> None:
    said = outlook(of(reserve=0), 0, embedded=False)
    assert "full in 11.0 days" in said and "data move" not in said


def test_a_data_directory_is_measured_by_its_parts(tmp_path: Path) -> None:
    for name in ("queue.db", "queue.db-wal", "traces/store/a/data.bin", "wal/1.log", "stack.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10_000)
    sizes = sizes_of(tmp_path)
    assert set(sizes) == {"queue.db", "traces", "wal", "the rest"}
    assert sizes["queue.db"] >= 20_000 and sizes["traces"] >= 10_000
