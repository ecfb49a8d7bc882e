"""Copies traces in ClickHouse's Native format between ClickHouses, to files and back, part by part, with counts and hashes compared.

Only inserted rows are copied; the target derives the content of its materialized views again. The target must be empty, and is emptied
again if the transfer fails. `snapshot` reads a table as of its first read, while others may write to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from agl_otel.errors import AglError, ConflictError, DataError, UsageError
from agl_otel.traces.cluster import LOCAL, on_cluster, stored_as
from agl_otel.traces.engine import DATABASE, ClickHouseError
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import VERSION

CHUNK_ROWS: Final = 20_000  # about 30 MB of typical spans in memory
DERIVED: Final = ("otel_traces_trace_id_ts", "rollout_summary_states", "services")
"""Tables that are not copied: views fill them."""
MANIFEST: Final = "traces.json"
Progress = Callable[[str, int, int], None]
"""(table, rows done, rows in all); in `load`: files."""


@dataclass(frozen=True, slots=True)
class Content:
    """The rows of one table."""

    rows: int
    digest: int
    """Sum of the rows' hashes modulo 2^64: independent of order, parts and time zones."""

    def __add__(self, other: Content) -> Content:
        return Content(self.rows + other.rows, (self.digest + other.digest) % (1 << 64))


NOTHING: Final = Content(0, 0)


class Chunk(NamedTuple):
    """Some rows of a table, in the Native format."""

    table: str
    content: Content
    total: int
    """Rows of the table, including deleted rows still on disk."""
    blocks: bytes


def tables(store: TraceStore) -> list[str]:
    """Return the sorted names of the tables to copy."""
    found = store.select(
        "SELECT name FROM system.tables WHERE database = {db:String} AND match(engine, 'MergeTree|Distributed') ORDER BY name", _DB
    )
    names = [str(row[0]) for row in found]
    return [name for name in names if name not in (*DERIVED, "agl_migrations") and not name.endswith(LOCAL)]


def content(store: TraceStore, table: str) -> Content:
    """Count and hash the current rows of `table`."""
    rows = store.select(f"SELECT count(), sum(cityHash64(*)) FROM {DATABASE}.{table}")
    return Content(int(str(rows[0][0])), int(str(rows[0][1])))


def snapshot(source: TraceStore, table: str) -> Iterator[Chunk]:
    """Yield the current rows of `table`, without parts added later. Merges of the table are stopped until the end.

    Iterate in one thread: reads use its own connection, so that inserts do not wait for them.
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


class Target:
    """A target during a transfer; see `empty_target`."""

    def __init__(self, target: TraceStore) -> None:
        self._target = target
        self.sent: dict[str, Content] = {}
        """{table: content inserted so far}."""

    def begin(self, table: str) -> None:
        """Start a table; it may have no chunks."""
        self.sent[table] = NOTHING

    def insert(self, table: str, rows: Content, blocks: bytes) -> None:
        """Insert rows in the Native format."""
        self.sent[table] += rows
        token = str(uuid4())  # unique: blocks are never resent, and chunks of equal content must all be stored
        self._target.insert(f"{DATABASE}.{table}", (), [blocks], format_name="Native", token=token)

    def compare(self) -> None:
        """Raise DataError if the target does not hold exactly what was sent."""
        for table, sent in self.sent.items():
            if sent != (arrived := content(self._target, table)):
                raise DataError(
                    f"{table}: {sent.rows} rows were sent and {arrived.rows} arrived, or their contents differ (hash {sent.digest} and "
                    f"{arrived.digest}). The source is untouched; try again while nothing writes to either"
                )

    def undo(self) -> None:
        """Empty the target, unless it holds more rows than were sent."""
        if all(content(self._target, table).rows <= self.sent.get(table, NOTHING).rows for table in tables(self._target)):
            cluster = self._target.cluster
            for table in (*self.sent, *DERIVED):
                self._target.command(f"TRUNCATE TABLE {DATABASE}.{stored_as(table, cluster)}{on_cluster(cluster)}")


@contextlib.contextmanager
def empty_target(target: TraceStore) -> Generator[Target]:
    """Provide an empty `target` for inserts; empty it again if the block fails. Raises ConflictError if it holds traces."""
    for table in tables(target):
        if rows := content(target, table).rows:
            raise ConflictError(
                f"the target already holds {rows} rows in {DATABASE}.{table}, and nothing is overwritten: "
                f"take an empty one, or empty this one first (DROP DATABASE {DATABASE})"
            )
    made = Target(target)
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


def copy(source: TraceStore, target: Target, progress: Progress | None = None) -> dict[str, Content]:
    """Copy all traces (nothing may write to them meanwhile) and compare. Returns {table: its content}. Raises DataError."""
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
    """Write all traces into a new `directory`. Returns {table: its content}."""
    files = DumpFiles(directory, progress)
    for table in tables(source):
        files.begin(table)
        for chunk in snapshot(source, table):
            files.add(chunk)
    return files.finish()


class DumpFiles:
    """Writes a dump: one file per chunk, and a manifest last."""

    def __init__(self, directory: Path, progress: Progress | None = None) -> None:
        self._directory = directory
        self._progress = progress
        self._held: dict[str, Content] = {}
        self._files: list[dict[str, Any]] = []

    def begin(self, table: str) -> None:
        """Start a table; it may have no chunks."""
        (self._directory / table).mkdir(parents=True)
        self._held[table] = NOTHING

    def add(self, chunk: Chunk) -> None:
        """Write one chunk of the table."""
        path = self._directory / chunk.table / f"{len(self._files):06}.native"
        path.write_bytes(chunk.blocks)
        digest = hashlib.sha256(chunk.blocks).hexdigest()
        file = str(path.relative_to(self._directory))
        self._files.append({"table": chunk.table, "file": file, "sha256": digest, "content": asdict(chunk.content)})
        self._held[chunk.table] += chunk.content
        if self._progress:
            self._progress(chunk.table, self._held[chunk.table].rows, chunk.total)

    def finish(self) -> dict[str, Content]:
        """Write the manifest. Returns {table: its content}."""
        manifest = {"schema": VERSION, "tables": list(self._held), "files": self._files}
        (self._directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return self._held


def check_dump(directory: Path) -> dict[str, Any]:
    """Return a dump's manifest after checking that its files are complete. Raises UsageError, ConflictError or DataError."""
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


def load(directory: Path, target: Target, progress: Progress | None = None) -> dict[str, Content]:
    """Insert a dump and compare. Returns {table: its content}. Raises what check_dump raises, and DataError."""
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
