"""Parts of tables that ClickHouse detached because their files are damaged (`detached/broken-on-start_*`), and whether their rows are lost.

A merge that a full disk cut off leaves a damaged part and, for `old_parts_lifetime`, its intact sources. On loading, the table uses the
sources and detaches the damaged part: no row is lost. Without its sources, rows may be lost. Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.traces.cluster import on_every_node
from agl_otel.traces.engine import DATABASE, Engine

Select = Callable[[str, Mapping[str, object] | None], list[list[object]]]
_DAMAGED: Final = (
    "SELECT table, name, path, partition_id, min_block_number, max_block_number FROM system.detached_parts "
    f"WHERE database = '{DATABASE}' AND startsWith(reason, 'broken') ORDER BY table, name"
)
_SOURCES: Final = (
    f"SELECT min_block_number, max_block_number, rows FROM system.parts WHERE database = '{DATABASE}' AND table = {{table:String}} "
    "AND partition_id = {partition:String} AND min_block_number >= {first:Int64} AND max_block_number <= {last:Int64} "
    "ORDER BY min_block_number, max_block_number DESC, level DESC, data_version DESC"
)
_OF_SERVER: Final = (
    "SELECT hostName() AS host, table, name, path FROM system.detached_parts "
    f"WHERE database = '{DATABASE}' AND startsWith(reason, 'broken') AND table NOT IN "
    f"(SELECT name FROM system.tables WHERE database = '{DATABASE}' AND startsWith(engine, 'Replicated')) ORDER BY table, name"
)
_PREFIX: Final = re.compile(r"^broken(?:-on-start)?_|_try\d+$")
_logger = logging.getLogger(__name__)


class DamagedPart(NamedTuple):
    """A damaged part whose rows may be lost."""

    table: str
    part: str
    rows: int | None
    """None: unknown."""
    path: Path

    @property
    def words(self) -> str:
        """What happened, and what to do."""
        rows = f"its {self.rows} rows" if self.rows is not None else "its rows"
        return (
            f"part {self.part} of {self.table} is damaged, and {rows} may be lost: ClickHouse moved it to {self.path} "
            "(examine that folder, and remove it to end this message)"
        )


def examine(select: Select, known: Mapping[tuple[str, str], int]) -> list[DamagedPart]:
    """Return the damaged parts whose rows may be lost.

    The folders of the others get ClickHouse's prefix `ignored_`. `known` is {(table, part): number of rows}, 0 for parts whose rows will be
    inserted again. Raises ClickHouseError.
    """
    found: list[DamagedPart] = []
    for table, name, place, partition, first, last in (map(str, row) for row in select(_DAMAGED, None)):
        path, part = Path(place), _PREFIX.sub("", name)
        rows = known.get((table, part), _counted(path))
        blocks = {"table": table, "partition": partition, "first": first, "last": last}
        if rows != 0 and not _held(select(_SOURCES, blocks) if first != "None" else [], first, last, rows):
            found.append(DamagedPart(table, part, rows, path))
            continue
        _logger.warning(
            "part %s of %s was cut off by a full disk; its rows are %s", part, table, "in its sources" if rows != 0 else "inserted again"
        )
        with contextlib.suppress(OSError):  # examined again at the next start
            path.rename(_free_name(path.parent, f"ignored_{part}"))
    return found


def of_server(engine: Engine) -> list[str]:
    """Describe the damaged parts that a server detached; replicated tables fetch theirs again. Raises ClickHouseError."""
    rows = engine.select(on_every_node(_OF_SERVER, engine.cluster))
    return [
        f"part {name} of {table} is damaged, and its rows may be lost: the ClickHouse server {host} moved it to {path} "
        f"(examine it, and remove it with ALTER TABLE {DATABASE}.{table} DROP DETACHED PART to end this message)"
        for host, table, name, path in rows
    ]


def _held(sources: Sequence[Sequence[object]], first: str, last: str, rows: int | None) -> bool:
    """Whether parts within a damaged part's blocks hold all of its rows; a part that another of them covers does not count."""
    end, held, begins = -1, 0, False
    for low, high, count in ([int(str(value)) for value in row] for row in sources):
        begins = begins or low == int(first)
        if low > end:
            end, held = high, held + count
    return begins and end == int(last) and (rows is None or held >= rows)


def _counted(path: Path) -> int | None:
    try:
        return int((path / "count.txt").read_text()) or None
    except (OSError, ValueError):
        return None


def _free_name(folder: Path, name: str) -> Path:
    names = (folder / f"{name}{end}" for end in ("", *(f"_try{number}" for number in range(1, 1000))))
    return next(path for path in names if not path.exists())
