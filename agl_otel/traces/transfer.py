"""Traces from one ClickHouse to another, or to files and back: in the Native format, part by part, counted and hashed on both sides.

Only what was inserted is carried; what materialized views derive from it, the target derives again. A target that holds anything is
refused. `snapshot` reads a table as it is when it is begun, whoever writes meanwhile; `move` needs a source that nobody writes to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agl_otel.errors import ConflictError, DataError, UsageError
from agl_otel.traces.cluster import LOCAL
from agl_otel.traces.engine import DATABASE
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import VERSION

CHUNK_ROWS: Final = 20_000  # about 30 MB of ordinary spans in memory
DERIVED: Final = frozenset({"otel_traces_trace_id_ts", "rollout_summary_states", "services", "agl_migrations"})
"""Tables that are not carried: views fill them, or the schema does."""
MANIFEST: Final = "traces.json"
Progress = Callable[[str, int, int], None]
"""(table, rows done, rows in all)"""


@dataclass(frozen=True, slots=True)
class Content:
    """What one table holds."""

    rows: int
    digest: int
    """The sum of the hashes of all rows, modulo 2^64: independent of order, parts and time zones."""


def tables(store: TraceStore) -> list[str]:
    """The names of the tables that are carried, in order."""
    found = store.select(
        "SELECT name FROM system.tables WHERE database = {db:String} AND match(engine, 'MergeTree|Distributed') ORDER BY name", _DB
    )
    return [name for name in (str(row[0]) for row in found) if name not in DERIVED and not name.endswith(LOCAL)]


def content(store: TraceStore, table: str) -> Content:
    """What `table` holds now."""
    rows = store.select(f"SELECT count(), sum(cityHash64(*)) FROM {DATABASE}.{table}")
    return Content(int(str(rows[0][0])), int(str(rows[0][1])))


def move(source: TraceStore, target: TraceStore, progress: Progress | None = None) -> dict[str, Content]:
    """Copy all traces into an empty `target`; the source stays as it is. Returns what each table holds now.

    Raises ConflictError where the target holds traces, DataError where what arrived is not what was sent.
    """
    refuse_unless_empty(target)
    held: dict[str, Content] = {}
    for table in tables(source):
        held[table] = content(source, table)
        name, done = f"{DATABASE}.{table}", 0
        with _ranges(source, table) as ranges:
            for some in ranges:
                target.insert_native(name, source.read(f"SELECT * FROM {name} {some.where}", "Native"))
                done += some.rows
                if progress:
                    progress(table, done, some.total)
        _compare(table, held[table], content(target, table))
    return held


def dump(source: TraceStore, directory: Path, progress: Progress | None = None) -> dict[str, Content]:
    """Write all traces into `directory` (made here). Returns what was written."""
    files = DumpFiles(directory, progress)
    for table in tables(source):
        files.begin(table)
        for chunk in snapshot(source, table):
            files.add(chunk)
    return files.finish()


class DumpFiles:
    """A dump that is being written: a file for each chunk, and a manifest last."""

    def __init__(self, directory: Path, progress: Progress | None = None) -> None:
        self._directory = directory
        self._progress = progress
        self._held: dict[str, Content] = {}
        self._files: list[dict[str, Any]] = []

    def begin(self, table: str) -> None:
        """Chunks of this table follow, or none."""
        (self._directory / table).mkdir(parents=True)
        self._held[table] = Content(0, 0)

    def add(self, chunk: Chunk) -> None:
        """One chunk of a table that was begun."""
        path = self._directory / chunk.table / f"{len(self._files):06}.native"
        path.write_bytes(chunk.blocks)
        digest = hashlib.sha256(chunk.blocks).hexdigest()
        self._files.append({"table": chunk.table, "file": str(path.relative_to(self._directory)), "sha256": digest})
        held = self._held[chunk.table]
        self._held[chunk.table] = Content(held.rows + chunk.rows, (held.digest + chunk.digest) % (1 << 64))
        if self._progress:
            self._progress(chunk.table, self._held[chunk.table].rows, chunk.total)

    def finish(self) -> dict[str, Content]:
        """Write the manifest. Returns what each table holds."""
        manifest = {
            "schema": VERSION,
            "tables": {table: asdict(each) for table, each in self._held.items()},
            "files": self._files,
        }
        (self._directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return self._held


def check_dump(directory: Path) -> dict[str, Any]:
    """The manifest of a dump whose files are all there and whole. Raises UsageError or DataError."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise UsageError(f"{directory} holds no finished backup of traces: there is no {MANIFEST}") from None
    if manifest["schema"] != VERSION:
        raise ConflictError(
            f"the traces in {directory} have schema {manifest['schema']}, and this release of agl-otel has schema {VERSION}: "
            "restore them with the release that wrote them"
        )
    for entry in manifest["files"]:
        path = directory / entry["file"]
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            raise DataError(f"{path} is missing or damaged: it is not what was backed up")
    return manifest


def load(directory: Path, target: TraceStore, progress: Progress | None = None) -> dict[str, Content]:
    """Insert a dump into an empty `target`. Raises as check_dump, and ConflictError where the target holds traces."""
    manifest = check_dump(directory)
    refuse_unless_empty(target)
    held = {table: Content(**values) for table, values in manifest["tables"].items()}
    for number, entry in enumerate(manifest["files"], start=1):
        target.insert_native(f"{DATABASE}.{entry['table']}", (directory / entry["file"]).read_bytes())
        if progress:
            progress(entry["table"], number, len(manifest["files"]))
    for table, expected in held.items():
        _compare(table, expected, content(target, table))
    return held


def refuse_unless_empty(target: TraceStore) -> None:
    """Raise ConflictError where `target` holds traces."""
    for table in tables(target):
        if rows := content(target, table).rows:
            raise ConflictError(
                f"the target already holds {rows} rows in {DATABASE}.{table}, and nothing is overwritten: "
                f"take an empty one, or empty this one first (DROP DATABASE {DATABASE})"
            )


class Chunk(NamedTuple):
    """Some rows of a table, in the Native format."""

    table: str
    rows: int
    digest: int
    """Of these rows, as Content has it of all."""
    total: int
    """Rows of the table, those that are deleted and not gone yet among them."""
    blocks: bytes


def snapshot(source: TraceStore, table: str) -> Iterator[Chunk]:
    """The rows of `table` as they are now. It merges no parts meanwhile, so that those of now stand still; new ones are left alone.

    Reads on the calling thread's own connection, always the same thread's: inserts do not wait for it.
    """
    name = f"{DATABASE}.{table}"
    with _ranges(source, table) as ranges:
        for some in ranges:
            counted = source.read(f"SELECT count(), sum(cityHash64(*)) FROM {name} {some.where}", "TabSeparated").split()
            if found := int(counted[0]):  # else all of them were deleted
                yield Chunk(table, found, int(counted[1]), some.total, source.read(f"SELECT * FROM {name} {some.where}", "Native"))


class _Range(NamedTuple):
    where: str
    """The condition that these rows alone fulfil."""
    rows: int
    """Those that are deleted and not gone yet among them, as in `total`."""
    total: int


@contextlib.contextmanager
def _ranges(source: TraceStore, table: str) -> Generator[list[_Range]]:
    """All rows of `table` as they are now, in pieces; no parts are merged until the end."""
    name = f"{DATABASE}.{table}"
    if source.select("SELECT 1 FROM system.tables WHERE database = {db:String} AND engine = 'Distributed' LIMIT 1", _DB):
        raise UsageError("the traces are on a cluster: use ClickHouse's own BACKUP … ON CLUSTER")
    source.command(f"SYSTEM STOP MERGES {name}")
    try:
        found = source.select(
            "SELECT name, rows FROM system.parts WHERE database = {db:String} AND table = {table:String} AND active ORDER BY name",
            {**_DB, "table": table},
        )
        parts = [(str(part), int(str(rows))) for part, rows in found]
        total = sum(rows for _, rows in parts)
        yield [
            _Range(f"WHERE _part = '{part}' AND _part_offset >= {start} AND _part_offset < {end}", end - start, total)
            for part, rows in parts
            for start, end in _pieces(rows)
        ]
    finally:
        source.command(f"SYSTEM START MERGES {name}")


def _pieces(rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS))


def _compare(table: str, sent: Content, arrived: Content) -> None:
    if sent != arrived:
        raise DataError(
            f"{table}: {sent.rows} rows were sent and {arrived.rows} arrived, or their contents differ (hash {sent.digest} and "
            f"{arrived.digest}). The source is untouched; empty the target (DROP DATABASE {DATABASE}) and try again while nothing writes"
        )


_DB: Final = {"db": DATABASE}
