"""Backs up a stack to a folder, restores a data directory from it, and moves embedded stores to servers.

Each store is copied in its own way: SQLite's backup API, pg_dump, and ClickHouse's Native format (traces/transfer.py); the write-ahead
log and refused requests are plain files. Backup and restore write to a temporary name and rename at the end.

A stopped stack is copied with its log, which recovery later compares with the restored ClickHouse. Of a running stack the queue is copied
first, then a barrier makes all acked data visible, then the traces are copied: so the backup holds everything acked before it, and every
rollout that had ended in the copied queue has all its spans. Later spans may be included.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from agl_otel import __version__
from agl_otel.errors import ConflictError, DataError, SettingsError, UnavailableError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.queue.schema import VERSION, check_version
from agl_otel.queue.sqlite import sqlite_path, table_names
from agl_otel.settings import Settings
from agl_otel.traces.collector_client import COPY_SECONDS, barriers, open_session, posting
from agl_otel.traces.opened import CHDB_SCHEME, TraceStore, open_store
from agl_otel.traces.transfer import Chunk, Content, DumpFiles, Progress, check_dump, copy, dump, empty_target, load

FORMAT: Final = 1
MANIFEST: Final = "backup.json"
SQLITE_FILE: Final = "queue.db"
POSTGRES_FILE: Final = "queue.pgdump"
TRACES: Final = "traces"
PLAIN: Final = ("wal", "refused", "VERSION")  # copied as plain files
_RAISE: Final = (
    "INSERT INTO sequences (rollout_id, last) VALUES (?, ?) ON CONFLICT (rollout_id) DO UPDATE SET last = max(last, excluded.last)"
)
_LAST_NUMBERS: Final = (
    "SELECT RolloutId, max(SequenceId) FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)} GROUP BY RolloutId"
)


def backup(settings: Settings, target: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Back up a stopped stack to `target`, which must be empty or not exist. Returns the manifest.

    Raises UsageError if the target is not empty, InUseError if a collector runs, and what queue.postgres.transfer.dump raises.
    """
    staging, queue = _begin(settings, target, PLAIN)
    with _opened(settings.clickhouse_db) as store:
        held = dump(store, staging / TRACES, progress)
    return _finish(staging, target, queue, held)


async def backup_running(settings: Settings, queue: QueueClient, target: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Back up the running stack on the data directory of `settings` without stopping it. Returns the manifest.

    Raises what `backup` raises, and UnavailableError if a collector does not answer.
    """
    staging, copied = await asyncio.to_thread(_begin, settings, target, ("refused", "VERSION"))
    collectors = [address.rstrip("/") for address in (await queue.describe()).collectors]
    async with open_session(settings.token.get_secret_value(), read_bufsize=1 << 20) as session:
        if not collectors:
            raise UnavailableError("no collector has registered: is the stack still starting?")
        await barriers(session, collectors)
        if settings.clickhouse_db.startswith(CHDB_SCHEME):
            async with posting(session, f"{collectors[0]}/copy", seconds=COPY_SECONDS) as answer:
                held = await _receive(answer.content, DumpFiles(staging / TRACES, progress))
        else:
            held = await asyncio.to_thread(_dump_server, settings.clickhouse_db, staging / TRACES, progress)
    return await asyncio.to_thread(_finish, staging, target, copied, held)


def _dump_server(url: str, directory: Path, progress: Progress | None) -> dict[str, Content]:
    with _opened(url) as store:
        return dump(store, directory, progress)


async def _receive(stream: aiohttp.StreamReader, files: DumpFiles) -> dict[str, Content]:
    """Write the frames of collector/copying.py to files. Raises UnavailableError if they end early."""
    table = ""
    try:
        while line := await stream.readline():
            frame = json.loads(line)
            if "end" in frame:
                return files.finish()
            if "table" in frame:
                table = str(frame["table"])
                files.begin(table)
                continue
            blocks = await stream.readexactly(frame["bytes"])
            held = Content(frame["rows"], frame["digest"])
            await asyncio.to_thread(files.add, Chunk(table, held, frame["total"], blocks))
    except asyncio.IncompleteReadError:
        pass
    raise UnavailableError(f"the collector broke off its copy of the traces at {table}: see its log, and back up again")


def _begin(settings: Settings, target: Path, plain: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Create the staging folder and copy the queue and the files `plain` into it; return it and the manifest's part about the queue."""
    _refuse_unless_empty(target)
    staging = _staging(target)
    source = sqlite_path(settings.queue_db)
    if source is None:
        copied = {"file": POSTGRES_FILE, **_postgres_transfer().dump(settings.queue_db, staging / POSTGRES_FILE)}
    else:
        copied = {"file": SQLITE_FILE, "rows": copy_queue(source, staging / SQLITE_FILE)}
    for name in plain:
        _copy_plain(settings.data_dir.absolute() / name, staging / name)
    return staging, copied


def _finish(staging: Path, target: Path, queue: dict[str, Any], held: dict[str, Content]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "agl_otel": __version__,
        "queue": {**queue, "version": VERSION, "sha256": _sha256(staging / queue["file"])},
        "traces": {table: each.rows for table, each in held.items()},
        "log_files": {str(path.relative_to(staging)): _sha256(path) for path in sorted((staging / "wal").rglob("*")) if path.is_file()},
    }
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    _into_place(staging, target)
    return manifest


def restore(source: Path, settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Restore a backup into the data directory and the servers of `settings`, all of which must be empty.

    Raises UsageError, SettingsError, ConflictError, UnavailableError or DataError, and then leaves no data directory.
    """
    manifest = _check(source)
    data_dir = settings.data_dir.absolute()
    _refuse_unless_empty(data_dir)
    queue = source / manifest["queue"]["file"]
    embedded = sqlite_path(settings.queue_db) is not None
    if embedded and queue.name == POSTGRES_FILE:
        raise SettingsError(f"the queue in {source} is of PostgreSQL: name an empty PostgreSQL database with AGL_QUEUE_URL")
    staging = _staging(data_dir)
    for name in PLAIN:
        _copy_plain(source / name, staging / name)
    url = settings.clickhouse_db
    own = url == f"{CHDB_SCHEME}{data_dir / TRACES}"
    with _opened(f"{CHDB_SCHEME}{staging / TRACES}" if own else url) as store, empty_target(store) as target:
        load(source / TRACES, target, progress)
        if queue.name == POSTGRES_FILE:
            _postgres_transfer().restore(queue, manifest["queue"], settings.queue_db, lambda going: _last_numbers(store, going))
        else:
            copy_queue(queue, staging / SQLITE_FILE)
            _raise_sequences(store, staging / SQLITE_FILE)
            if not embedded:
                _postgres_transfer().move(staging / SQLITE_FILE, settings.queue_db)
                (staging / SQLITE_FILE).unlink()
    (staging / f"{TRACES}.lock").unlink(missing_ok=True)
    _into_place(staging, data_dir)
    return manifest


def move(settings: Settings, *, queue_url: str = "", clickhouse_url: str = "", progress: Progress | None = None) -> dict[str, Any]:
    """Copy the embedded queue, traces, or both, of a stopped stack to empty servers. Returns {"queue" or "traces": rows}.

    The embedded stores are not changed. Raises SettingsError, ConflictError, UnavailableError, DataError; the servers are then empty.
    """
    data_dir = settings.data_dir.absolute()
    queue, traces = data_dir / SQLITE_FILE, data_dir / TRACES
    for wanted, path in ((queue_url, queue), (clickhouse_url, traces)):
        if wanted and not path.exists():
            raise SettingsError(f"there is nothing to move in {settings.data_dir}, {path.name} is missing: name its data directory")
    moved: dict[str, Any] = {}
    with contextlib.ExitStack() as closers:
        if clickhouse_url:
            source = closers.enter_context(_opened(f"{CHDB_SCHEME}{traces}"))
            target = closers.enter_context(empty_target(closers.enter_context(_opened(clickhouse_url))))
            moved["traces"] = {table: each.rows for table, each in copy(source, target, progress).items()}
        if queue_url:
            moved["queue"] = _postgres_transfer().move(queue, queue_url)
    return moved


def _postgres_transfer() -> Any:
    """Import queue/postgres/transfer.py. Raises SettingsError if PostgreSQL's driver, an extra, is missing."""
    try:
        from agl_otel.queue.postgres import transfer
    except ImportError as error:
        raise SettingsError(f"the queue is on PostgreSQL and {error.name} is missing: pip install 'agl-otel[postgres]'") from None
    return transfer


def copy_queue(source: Path, target: Path) -> dict[str, int]:
    """Copy a SQLite database, which may be in use, by SQLite's backup API. Returns {table: rows}, compared on both sides."""
    if not source.exists():
        raise UsageError(f"there is no queue at {source}: is that the data directory of a stack?")
    with sqlite3.connect(f"file:{source}?mode=ro", uri=True) as old, sqlite3.connect(target) as new:
        old.execute("BEGIN")  # counts and copy see the same snapshot despite concurrent writes
        before = _counts(old)
        old.backup(new)
        new.execute("PRAGMA journal_mode = DELETE")  # a single file, without a separate log
        (verdict,) = new.execute("PRAGMA integrity_check").fetchone()
        after = _counts(new)
        (version,) = new.execute("SELECT max(version) FROM schema_migrations").fetchone()
    old.close()
    new.close()
    if verdict != "ok" or before != after:
        raise DataError(f"the copy of {source} is not what it should be (integrity: {verdict}): it is damaged, or the disk is full")
    check_version(version, str(source))
    return after


def _raise_sequences(store: TraceStore, queue: Path) -> None:
    """Raise the counters of unfinished rollouts above numbers issued after the queue was copied, so that none is issued twice."""
    with contextlib.closing(sqlite3.connect(queue)) as database, database:
        marks = ", ".join("?" * len(FINISHED))
        going = [row[0] for row in database.execute(f"SELECT rollout_id FROM rollouts WHERE status NOT IN ({marks})", sorted(FINISHED))]
        database.executemany(_RAISE, _last_numbers(store, going))


def _last_numbers(store: TraceStore, rollouts: Sequence[str]) -> list[tuple[str, int]]:
    """Return (rollout id, highest sequence number) of those of these rollouts that have spans."""
    found: list[tuple[str, int]] = []
    for start in range(0, len(rollouts), 10_000):
        rows = store.select(_LAST_NUMBERS, {"rollouts": rollouts[start : start + 10_000]})
        found += [(str(rollout), int(str(last))) for rollout, last in rows]
    return found


def _counts(database: sqlite3.Connection) -> dict[str, int]:
    return {name: int(database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]) for name in table_names(database)}


@contextlib.contextmanager
def _opened(url: str) -> Generator[TraceStore]:
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def _check(source: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{source} is not a finished backup: there is no {MANIFEST} in it") from None
    if manifest["format"] != FORMAT:
        raise ConflictError(f"{source} was written by agl-otel {manifest['agl_otel']} in another format: restore it with that release")
    for name, digest in {manifest["queue"]["file"]: manifest["queue"]["sha256"], **manifest["log_files"]}.items():
        if not (source / name).exists() or _sha256(source / name) != digest:
            raise DataError(f"{source / name} is missing or damaged: it differs from the manifest of the backup")
    check_version(manifest["queue"]["version"], str(source))
    check_dump(source / TRACES)
    return manifest


def _refuse_unless_empty(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} is not empty, and nothing is overwritten: name a folder that does not exist yet")


def _staging(target: Path) -> Path:
    staging = target.absolute().with_name(f"{target.name}.partial")
    try:
        if staging.exists():
            shutil.rmtree(staging)  # left by an interrupted backup
        staging.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write to {staging}: {error.strerror}") from None
    return staging


def _into_place(staging: Path, target: Path) -> None:
    if target.exists():
        target.rmdir()  # checked to be empty
    staging.rename(target)


def _copy_plain(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
