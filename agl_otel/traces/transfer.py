"""Traces in ClickHouse's Native format: from one ClickHouse to another, to files and back, part by part, counted and hashed on both sides.

Only what was inserted is carried; the target derives anew what its materialized views hold. A target that holds anything is refused, and is
emptied again where a transfer into it fails. `snapshot` reads a table as it is when it is begun, while others write to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agl_otel.errors import AglError, ConflictError, DataError, UsageError
from agl_otel.traces.cluster import LOCAL, on_cluster, stored_as
from agl_otel.traces.engine import DATABASE, ClickHouseError
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import VERSION

CHUNK_ROWS: Final = 20_000  # about 30 MB of ordinary spans in memory
DERIVED: Final = ("otel_traces_trace_id_ts", "rollout_summary_states", "services")
"""Tables that are not carried: views fill them."""
MANIFEST: Final = "traces.json"
Progress = Callable[[str, int, int], None]
"""(table, rows done, rows in all)"""


@dataclass(frozen=True, slots=True)
class Content:
    """The rows of one table."""

    rows: int
    digest: int
    """The sum of the hashes of all rows, modulo 2^64: independent of order, parts and time zones."""

    def __add__(self, other: Content) -> Content:
        return Content(self.rows + other.rows, (self.digest + other.digest) % (1 << 64))


NOTHING: Final = Content(0, 0)


class Chunk(NamedTuple):
    """Some rows of a table, in the Native format."""

    table: str
    content: Content
    total: int
    """Rows of the table, deleted rows that are still on disk included."""
    blocks: bytes


def tables(store: TraceStore) -> list[str]:
    """The names of the tables that are carried, in order."""
    found = store.select(
        "SELECT name FROM system.tables WHERE database = {db:String} AND match(engine, 'MergeTree|Distributed') ORDER BY name", _DB
    )
    names = [str(row[0]) for row in found]
    return [name for name in names if name not in (*DERIVED, "agl_migrations") and not name.endswith(LOCAL)]


def content(store: TraceStore, table: str) -> Content:
    """The rows of `table` now."""
    rows = store.select(f"SELECT count(), sum(cityHash64(*)) FROM {DATABASE}.{table}")
    return Content(int(str(rows[0][0])), int(str(rows[0][1])))


def snapshot(source: TraceStore, table: str) -> Iterator[Chunk]:
    """The rows of `table` as they are now; parts that come later are left out. Merges of the table wait until the end.

    Reads on the calling thread's own connection, always the same thread's: inserts do not wait for it.
    """
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
        for part, rows in parts:
            for start in range(0, rows, CHUNK_ROWS):
                where = f"WHERE _part = '{part}' AND _part_offset >= {start} AND _part_offset < {start + CHUNK_ROWS}"
                counted = source.read(f"SELECT count(), sum(cityHash64(*)) FROM {name} {where}", "TabSeparated").split()
                if int(counted[0]):  # else all of them were deleted
                    held = Content(int(counted[0]), int(counted[1]))
                    yield Chunk(table, held, total, source.read(f"SELECT * FROM {name} {where}", "Native"))
    finally:
        source.command(f"SYSTEM START MERGES {name}")


# --- into a ClickHouse


class Filling:
    """A target that is being filled; see `filling`."""

    def __init__(self, target: TraceStore) -> None:
        self._target = target
        self.sent: dict[str, Content] = {}
        """{table: rows inserted so far}."""

    def begin(self, table: str) -> None:
        """Chunks of this table follow, or none."""
        self.sent[table] = NOTHING

    def insert(self, table: str, rows: Content, blocks: bytes) -> None:
        """Insert rows in the Native format."""
        self.sent[table] += rows
        self._target.insert_native(f"{DATABASE}.{table}", blocks)

    def compare(self) -> None:
        """Raise DataError where the target does not hold what was sent."""
        for table, sent in self.sent.items():
            if sent != (arrived := content(self._target, table)):
                raise DataError(
                    f"{table}: {sent.rows} rows were sent and {arrived.rows} arrived, or their contents differ (hash {sent.digest} and "
                    f"{arrived.digest}). The source is untouched; try again while nothing writes to either"
                )

    def undo(self) -> None:
        """Empty the target, unless it holds rows of somebody else."""
        if all(content(self._target, table).rows <= self.sent.get(table, NOTHING).rows for table in tables(self._target)):
            cluster = self._target.cluster
            for table in (*self.sent, *DERIVED):
                self._target.command(f"TRUNCATE TABLE {DATABASE}.{stored_as(table, cluster)}{on_cluster(cluster)}")


@contextlib.contextmanager
def filling(target: TraceStore) -> Generator[Filling]:
    """Insert into an empty `target`; where the block fails, it is empty again. Raises ConflictError where it holds traces."""
    for table in tables(target):
        if rows := content(target, table).rows:
            raise ConflictError(
                f"the target already holds {rows} rows in {DATABASE}.{table}, and nothing is overwritten: "
                f"take an empty one, or empty this one first (DROP DATABASE {DATABASE})"
            )
    made = Filling(target)
    try:
        yield made
    except BaseException as failure:
        try:
            made.undo()
        except (AglError, ClickHouseError) as error:
            raise DataError(
                f"{failure}; what had arrived is still there ({error}): DROP DATABASE {DATABASE} before you try again"
            ) from failure
        raise


def copy(source: TraceStore, target: Filling, progress: Progress | None = None) -> dict[str, Content]:
    """Copy all traces, to which nobody writes meanwhile, and compare. Returns {table: what it holds}. Raises DataError."""
    for table in tables(source):
        target.begin(table)
        for chunk in snapshot(source, table):
            target.insert(table, chunk.content, chunk.blocks)
            if progress:
                progress(table, target.sent[table].rows, chunk.total)
    target.compare()
    return target.sent


# --- into files, and back


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
        self._held[table] = NOTHING

    def add(self, chunk: Chunk) -> None:
        """Write one chunk of a table that was begun."""
        path = self._directory / chunk.table / f"{len(self._files):06}.native"
        path.write_bytes(chunk.blocks)
        digest = hashlib.sha256(chunk.blocks).hexdigest()
        file = str(path.relative_to(self._directory))
        self._files.append({"table": chunk.table, "file": file, "sha256": digest, "content": asdict(chunk.content)})
        self._held[chunk.table] += chunk.content
        if self._progress:
            self._progress(chunk.table, self._held[chunk.table].rows, chunk.total)

    def finish(self) -> dict[str, Content]:
        """Write the manifest. Returns {table: what was written}."""
        manifest = {"schema": VERSION, "tables": list(self._held), "files": self._files}
        (self._directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return self._held


def check_dump(directory: Path) -> dict[str, Any]:
    """The manifest of a dump whose files are all there and whole. Raises UsageError, ConflictError or DataError."""
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


def load(directory: Path, target: Filling, progress: Progress | None = None) -> dict[str, Content]:
    """Insert a dump, and compare. Returns {table: what it holds}. Raises as check_dump, and DataError."""
    manifest = check_dump(directory)
    for table in manifest["tables"]:
        target.begin(table)
    for number, entry in enumerate(manifest["files"], start=1):
        target.insert(entry["table"], Content(**entry["content"]), (directory / entry["file"]).read_bytes())
        if progress:
            progress(entry["table"], number, len(manifest["files"]))
    target.compare()
    return target.sent


_DB: Final = {"db": DATABASE}
