"""`agl-otel disk`: what of a data directory fills the disk, how fast, and when it will be full.

Spans fill it: the rest grows with rollouts, or is bounded (the write-ahead log). So the rate is that of the rows that were received last,
times what a row takes on disk by now. `forecast` is pure.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from agl_otel.cli.common import data_dir_option, json_option, print_json, run_async, setup_logging
from agl_otel.cli.queue import table_of
from agl_otel.errors import SettingsError
from agl_otel.settings import DAY_SECONDS, Settings
from agl_otel.stack.supervisor import open_store
from agl_otel.traces.opened import CHDB_SCHEME
from agl_otel.traces.opened import open_store as open_traces

PARTS: Final[Mapping[str, str]] = {
    "traces": "spans, logs and metrics (ClickHouse)",
    "queue.db": "rollouts, attempts, resources, with SQLite's log",
    "wal": "what was acknowledged and is not stored yet",
    "refused": "what ClickHouse refused, with the reasons",
    "runs": "checkpoints and figures of training runs",
    "logs": "what the services say",
}
"""{first part of a name in the data directory: what it holds}."""
WINDOWS: Final = (3600.0, DAY_SECONDS)
"""Seconds over which the rate is measured: the last hour; the last day where nothing came in it."""
_SERVER: Final = """SELECT sum(bytes_on_disk) AS Bytes, (
    SELECT min(free_space) FROM system.disks WHERE name IN (SELECT disk_name FROM system.parts WHERE active AND database = 'otel')
) AS Free FROM system.parts WHERE active AND database = 'otel'"""
_RECEIVED: Final = """SELECT count() AS Rows, countIf(ReceivedAt > now() - 3600) AS Hour, countIf(ReceivedAt > now() - 86400) AS Day
FROM otel.otel_traces"""


@dataclass(frozen=True)
class Forecast:
    """How it goes on, if it goes on as it did."""

    bytes_per_day: float
    full_in_seconds: float | None
    """Until nothing more is taken; None: never, or nothing grows."""
    kept_bytes: float | None
    """What traces come to with the retention that is set; None without one."""


def forecast(
    *,
    traces_bytes: int,
    rows: int,
    received: Sequence[int],
    free: int,
    reserve: int,
    retention_days: int,
    windows: Sequence[float] = WINDOWS,
) -> Forecast:
    """Where it leads.

    Args:
        traces_bytes: what `rows` rows take on disk.
        received: how many of them came in each of `windows`.
        free: bytes of the disk; below `reserve` of them nothing more is taken.
        retention_days: after which rows are dropped; 0: never.
    """
    rate = next((count / seconds for count, seconds in zip(received, windows, strict=True) if count), 0.0)
    per_day = rate * DAY_SECONDS * (traces_bytes / rows if rows else 0.0)
    kept = per_day * retention_days if retention_days else None
    room = max(0, free - reserve)
    if not per_day or (kept is not None and kept - traces_bytes <= room):
        return Forecast(per_day, None, kept)
    return Forecast(per_day, room / per_day * DAY_SECONDS, kept)


@click.command()
@data_dir_option
@json_option
def disk(data_dir: Path | None, as_json: bool) -> None:
    """Show what of a data directory fills the disk, how fast it grows, and when the disk will be full.

    Traces on a ClickHouse server are on the server's disk, which is looked at too (of a cluster: that of the server that answers).
    """
    settings = Settings.load(data_dir=data_dir)
    setup_logging()
    folder = settings.data_dir.absolute()
    if not folder.is_dir():
        raise SettingsError(f"there is no data directory {folder}: name it with --data-dir")

    embedded = settings.clickhouse_db.startswith(CHDB_SCHEME)

    async def received() -> dict[str, Any]:
        async with open_store(settings) as opened:
            await opened.reader.barrier()
            return (await opened.reader.query(_RECEIVED))[0]

    counted = run_async(received)
    server = None if embedded else on_server(settings.clickhouse_db)
    sizes = sizes_of(folder)
    free = shutil.disk_usage(folder).free
    found = forecast(
        traces_bytes=server["bytes"] if server is not None else sizes.get("traces", 0),
        rows=int(counted["Rows"]),
        received=(int(counted["Hour"]), int(counted["Day"])),
        free=server["free_bytes"] if server is not None else free,
        reserve=settings.disk_reserve_bytes if embedded else 0,
        retention_days=settings.retention_days,
    )
    told = {"data_dir": str(folder), "bytes": sizes, "free_bytes": free, "reserve_bytes": settings.disk_reserve_bytes}
    if server is not None:
        told["server"] = server
    if as_json:
        print_json({**told, "rows": counted, **asdict(found), "embedded": embedded})
        return
    lines = [(name, f"{size / (1 << 20):,.1f}", PARTS.get(name, "")) for name, size in sorted(sizes.items(), key=lambda item: -item[1])]
    console = Console(highlight=False)
    console.print(table_of(str(folder), ("part", "MiB", "what"), lines))
    console.print(f"{free / (1 << 30):,.1f} GiB are free; below {settings.disk_reserve_bytes / (1 << 20):,.0f} MiB nothing more is taken")
    if server is not None:
        size, room = (server[name] / (1 << 30) for name in ("bytes", "free_bytes"))
        console.print(f"the ClickHouse server holds {size:,.1f} GiB, and {room:,.1f} GiB of its disk are free")
    console.print(outlook(found, settings.retention_days, embedded=embedded), markup=False)


def on_server(url: str) -> dict[str, int]:
    """What traces take on the server's disk, and what is free there (`bytes`, `free_bytes`). Raises ClickHouseError."""
    with closing(open_traces(url)) as engine:
        ((size, free),) = engine.select(_SERVER)
    return {"bytes": int(str(size)), "free_bytes": int(str(free))}


def sizes_of(folder: Path) -> dict[str, int]:
    """{part of the data directory: bytes that it takes on disk}; a file's companions (queue.db-wal) count as the file."""
    sizes: dict[str, int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            first = path.relative_to(folder).parts[0]
            part = next((known for known in PARTS if first == known or first.startswith((f"{known}-", f"{known}."))), "the rest")
            try:
                sizes[part] = sizes.get(part, 0) + path.lstat().st_blocks * 512
            except FileNotFoundError:  # a part that ClickHouse has just merged away
                continue
    return sizes


def outlook(found: Forecast, retention_days: int, *, embedded: bool) -> str:
    """The forecast in words."""
    if not found.bytes_per_day:
        return "no span was received within a day: nothing grows"
    grows = f"traces grow by {found.bytes_per_day / (1 << 30):,.2f} GiB a day"
    if found.full_in_seconds is None:
        kept = (found.kept_bytes or 0.0) / (1 << 30)
        return f"{grows}; retention_days = {retention_days} keeps about {kept:,.1f} GiB, for which there is room"
    days = found.full_in_seconds / DAY_SECONDS
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + min(found.full_in_seconds, 1e9)))
    remedies = ["lower retention_days" if retention_days else "set retention_days", "`agl-otel queue prune`"]
    more = "or `agl-otel data move` to a server" if embedded else "or a larger disk of the server"
    return f"{grows}: full in {days:,.1f} days ({when}). {', '.join([*remedies, more])}"
