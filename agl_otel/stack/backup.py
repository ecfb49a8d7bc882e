"""A data directory to a folder and back: the queue, the traces, the write-ahead log, and what was refused.

Everything is written beside its final name and renamed when it is whole, so that half a backup never looks like one. Of a stopped stack the
log belongs to it: what was acked and not yet stored comes back with it, and recovery asks the restored ClickHouse what it has.

Of a running stack the queue is copied first, then all that was acked is stored (a barrier), then the traces are copied: so everything that
was acked before is there, and a rollout that had ended in the copied queue has all its spans. What came meanwhile may be there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from agl_otel import __version__
from agl_otel.errors import ConflictError, DataError, SettingsError, UnavailableError, UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.queue.sqlite import sqlite_path, table_names
from agl_otel.settings import Settings
from agl_otel.traces.collector_client import COPY_SECONDS, barriers, open_session, posting
from agl_otel.traces.opened import CHDB_SCHEME, TraceStore, open_store
from agl_otel.traces.transfer import Chunk, Content, DumpFiles, Progress, check_dump, dump, load

FORMAT: Final = 1
MANIFEST: Final = "backup.json"
QUEUE_FILE: Final = "queue.db"
TRACES: Final = "traces"
PLAIN: Final = ("wal", "refused", "VERSION")  # copied as they are
_RAISE: Final = (
    "INSERT INTO sequences (rollout_id, last) VALUES (?, ?) ON CONFLICT (rollout_id) DO UPDATE SET last = max(last, excluded.last)"
)
_LAST_NUMBERS: Final = (
    "SELECT RolloutId, max(SequenceId) FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)} GROUP BY RolloutId"
)


def backup(settings: Settings, target: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Write everything of a stopped stack to `target`, which must not exist or be empty. Returns the manifest.

    A queue on PostgreSQL becomes a SQLite file, too, so that it can be restored to either. Raises UsageError where the target holds
    something, InUseError where a collector runs, and as queue.move.fetch.
    """
    staging, rows = _begin(settings, target, PLAIN)
    held = _with_store(settings.clickhouse_db, lambda store: dump(store, staging / TRACES, progress))
    return _finish(staging, target, rows, held)


async def backup_running(settings: Settings, queue: QueueClient, target: Path, progress: Progress | None = None) -> dict[str, Any]:
    """The same of a stack that runs on the data directory of `settings` and goes on running. Returns the manifest.

    Raises as `backup`, and UnavailableError where a collector cannot be asked.
    """
    staging, rows = await asyncio.to_thread(_begin, settings, target, ("refused", "VERSION"))
    collectors = [address.rstrip("/") for address in (await queue.describe()).collectors]
    async with open_session(settings.token.get_secret_value(), read_bufsize=1 << 20) as session:
        if not collectors:
            raise UnavailableError("no collector has said where it is: is the stack still starting?")
        await barriers(session, collectors)
        if settings.clickhouse_db.startswith(CHDB_SCHEME):
            async with posting(session, f"{collectors[0]}/copy", seconds=COPY_SECONDS) as answer:
                held = await _receive(answer.content, DumpFiles(staging / TRACES, progress))
        else:
            copy = partial(_with_store, settings.clickhouse_db, lambda store: dump(store, staging / TRACES, progress))
            held = await asyncio.to_thread(copy)
    return await asyncio.to_thread(_finish, staging, target, rows, held)


async def _receive(stream: aiohttp.StreamReader, files: DumpFiles) -> dict[str, Content]:
    """Write the frames of collector/copying.py. Raises UnavailableError where they end early."""
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
            await asyncio.to_thread(files.add, Chunk(table, frame["rows"], frame["digest"], frame["total"], blocks))
    except asyncio.IncompleteReadError:
        pass
    raise UnavailableError(f"the collector broke off its copy of the traces at {table}: see its log, and back up again")


def _begin(settings: Settings, target: Path, plain: Sequence[str]) -> tuple[Path, dict[str, int]]:
    """Where the backup is being written, with the queue and the files named `plain` in it; {table of the queue: rows}."""
    source = sqlite_path(settings.queue_db)
    _refuse_unless_empty(target)
    staging = _staging(target)
    rows = _fetch(settings.queue_db, staging / QUEUE_FILE) if source is None else copy_queue(source, staging / QUEUE_FILE)
    for name in plain:
        _copy_plain(settings.data_dir.absolute() / name, staging / name)
    return staging, rows


def _finish(staging: Path, target: Path, rows: dict[str, int], held: dict[str, Content]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "agl_otel": __version__,
        "queue": {"sha256": _sha256(staging / QUEUE_FILE), "rows": rows},
        "traces": {table: each.rows for table, each in held.items()},
        "log_files": {str(path.relative_to(staging)): _sha256(path) for path in sorted((staging / "wal").rglob("*")) if path.is_file()},
    }
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    _into_place(staging, target)
    return manifest


def restore(source: Path, settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Make the data directory of `settings` from a backup; neither it nor servers of theirs may hold anything.

    Raises UsageError, ConflictError or DataError; then nothing was put in place.
    """
    manifest = _check(source)
    data_dir = settings.data_dir.absolute()
    _refuse_unless_empty(data_dir)
    staging = _staging(data_dir)
    copy_queue(source / QUEUE_FILE, staging / QUEUE_FILE)
    for name in PLAIN:
        _copy_plain(source / name, staging / name)
    url = settings.clickhouse_db
    own = url == f"{CHDB_SCHEME}{data_dir / TRACES}"

    def fill(store: TraceStore) -> dict[str, Content]:
        held = load(source / TRACES, store, progress)
        _raise_sequences(store, staging / QUEUE_FILE)
        return held

    _with_store(f"{CHDB_SCHEME}{staging / TRACES}" if own else url, fill)
    (staging / f"{TRACES}.lock").unlink(missing_ok=True)
    if sqlite_path(settings.queue_db) is None:
        _move().move(staging / QUEUE_FILE, settings.queue_db)
        (staging / QUEUE_FILE).unlink()
    _into_place(staging, data_dir)
    return manifest


def _fetch(url: str, target: Path) -> dict[str, int]:
    move = _move()
    return move.fetch(url, target)


def _move() -> Any:
    try:
        from agl_otel.queue import move
    except ImportError as error:
        raise SettingsError(f"the queue is on PostgreSQL but {error.name} is missing: pip install 'agl-otel[postgres]'") from None
    return move


def copy_queue(source: Path, target: Path) -> dict[str, int]:
    """Copy a SQLite database with its own backup API, whoever has it open. Returns {table: rows}, the same on both sides."""
    if not source.exists():
        raise UsageError(f"there is no queue at {source}: is that the data directory of a stack?")
    with sqlite3.connect(f"file:{source}?mode=ro", uri=True) as old, sqlite3.connect(target) as new:
        old.execute("BEGIN")  # what is counted is what is copied, whoever writes meanwhile
        before = _counts(old)
        old.backup(new)
        new.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        (verdict,) = new.execute("PRAGMA integrity_check").fetchone()
        after = _counts(new)
    old.close()
    new.close()
    if verdict != "ok" or before != after:
        raise DataError(f"the copy of {source} is not what it should be (integrity: {verdict}): it is damaged, or the disk is full")
    return after


def _raise_sequences(store: TraceStore, queue: Path) -> None:
    """Spans of unfinished rollouts may have been numbered after the queue was copied: no number is given twice."""
    with sqlite3.connect(queue) as database:
        marks = ", ".join("?" * len(FINISHED))
        going = [row[0] for row in database.execute(f"SELECT rollout_id FROM rollouts WHERE status NOT IN ({marks})", sorted(FINISHED))]
        for start in range(0, len(going), 10_000):
            rows = store.select(_LAST_NUMBERS, {"rollouts": going[start : start + 10_000]})
            database.executemany(_RAISE, [(str(rollout), int(str(last))) for rollout, last in rows])
    database.close()


def _counts(database: sqlite3.Connection) -> dict[str, int]:
    return {name: int(database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]) for name in table_names(database)}


def _with_store(url: str, work: Callable[[TraceStore], dict[str, Content]]) -> dict[str, Content]:
    store = open_store(url)
    try:
        return work(store)
    finally:
        store.close()


def _check(source: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{source} is not a finished backup: there is no {MANIFEST} in it") from None
    if manifest["format"] > FORMAT:
        raise ConflictError(f"{source} was written by a newer agl-otel ({manifest['agl_otel']}): upgrade agl-otel first")
    for name, digest in {QUEUE_FILE: manifest["queue"]["sha256"], **manifest["log_files"]}.items():
        if not (source / name).exists() or _sha256(source / name) != digest:
            raise DataError(f"{source / name} is missing or damaged: it is not what was backed up")
    check_dump(source / TRACES)
    return manifest


def _refuse_unless_empty(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} is not empty, and nothing is overwritten: name a folder that does not exist yet")


def _staging(target: Path) -> Path:
    staging = target.absolute().with_name(f"{target.name}.partial")
    try:
        if staging.exists():
            shutil.rmtree(staging)  # what an interrupted run left
        staging.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write to {staging}: {error.strerror}") from None
    return staging


def _into_place(staging: Path, target: Path) -> None:
    if target.exists():
        target.rmdir()  # empty: it was checked
    staging.rename(target)


def _copy_plain(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
