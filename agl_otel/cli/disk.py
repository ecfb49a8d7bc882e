"""`agl-otel disk`: disk usage of a data directory by part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from agl_otel.cli.common import data_dir_option, json_option, print_json, setup_logging
from agl_otel.cli.output import open_console, table_of
from agl_otel.errors import SettingsError
from agl_otel.settings import Settings
from agl_otel.traces.opened import CHDB_SCHEME, open_store

PARTS: Final[Mapping[str, str]] = {
    "traces": "spans, logs and metrics (ClickHouse)",
    "queue.db": "rollouts, attempts, resources, with SQLite's log",
    "wal": "acknowledged spans that are not stored yet",
    "refused": "dead letters: data that ClickHouse refused, with the reasons",
    "runs": "checkpoints and figures of training runs",
    "logs": "logs of the services",
}
"""{first part of a name in the data directory: its content}."""
_SERVER: Final = """SELECT sum(bytes_on_disk) AS Bytes, (
    SELECT min(free_space) FROM system.disks WHERE name IN (SELECT disk_name FROM system.parts WHERE active AND database = 'otel')
) AS Free FROM system.parts WHERE active AND database = 'otel'"""


@click.command()
@data_dir_option
@json_option
def disk(data_dir: Path | None, as_json: bool) -> None:
    """Show the disk usage of a data directory by part, and the free space.

    With a ClickHouse server, the usage of the server's disk is shown too (in a cluster: of the server that answers).
    """
    settings = Settings.load(data_dir=data_dir)
    setup_logging()
    folder = settings.data_dir.absolute()
    if not folder.is_dir():
        raise SettingsError(f"there is no data directory {folder}: name it with --data-dir")

    server = None if settings.clickhouse_db.startswith(CHDB_SCHEME) else on_server(settings.clickhouse_db)
    sizes = sizes_of(folder)
    free = shutil.disk_usage(folder).free
    if as_json:
        found: dict[str, Any] = {"data_dir": str(folder), "bytes": sizes, "free_bytes": free, "reserve_bytes": settings.disk_reserve_bytes}
        print_json({**found, **({"server": server} if server is not None else {}), "embedded": server is None})
        return
    lines = [(name, f"{size / (1 << 20):,.1f}", PARTS.get(name, "")) for name, size in sorted(sizes.items(), key=lambda item: -item[1])]
    console = open_console(highlight=False)
    console.print(table_of(str(folder), ("part", "MiB", "what"), lines))
    console.print(f"{free / (1 << 30):,.1f} GiB are free; below {settings.disk_reserve_bytes / (1 << 20):,.0f} MiB nothing more is taken")
    if server is not None:
        size, room = (server[name] / (1 << 30) for name in ("bytes", "free_bytes"))
        console.print(f"the ClickHouse server holds {size:,.1f} GiB, and {room:,.1f} GiB of its disk are free")


def on_server(url: str) -> dict[str, int]:
    """Return the size of the traces on the server's disk and its free space, as `bytes` and `free_bytes`. Raises ClickHouseError."""
    with closing(open_store(url)) as engine:
        ((size, free),) = engine.select(_SERVER)
    return {"bytes": int(str(size)), "free_bytes": int(str(free))}


def sizes_of(folder: Path) -> dict[str, int]:
    """Return {part of the data directory: bytes on disk}; a file's companions (queue.db-wal) count as the file."""
    sizes: dict[str, int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            first = path.relative_to(folder).parts[0]
            part = next((known for known in PARTS if first == known or first.startswith((f"{known}-", f"{known}."))), "the rest")
            try:
                sizes[part] = sizes.get(part, 0) + path.lstat().st_blocks * 512
            except FileNotFoundError:  # ClickHouse removes parts after a merge
                continue
    return sizes
