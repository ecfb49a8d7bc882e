"""The embedded engine: SQLite in WAL mode with one writer thread and group commit; readers have their own connections.

The writer runs all waiting operations as one transaction and syncs once (synchronous=FULL); nothing is acknowledged before that sync.
If one of them raises, the group runs again with a savepoint for each. A lock file prevents a second service on the same file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from agl_otel.errors import FULL_DISK, AglError, ConflictError, DiskFullError, InUseError, SettingsError, UnavailableError
from agl_otel.queue import schema
from agl_otel.queue.engine import Instrumented, Operation, Params, RunTallies, Signals, tally_changes
from agl_otel.queue.rows import Row
from agl_otel.queue.statements import Statements
from agl_otel.service.lock import FileLock

T = TypeVar("T")
GROUP: Final = 256  # most operations in one transaction: bounds how long the first waits for the last
BUSY_SECONDS: Final = 5.0  # how long another process (a backup, a shell) may lock the file
CHECKPOINT_PAGES: Final = 8192  # 32 MB of log: fewer, larger checkpoints, since each also syncs the database file
_PRIMARY: Final = 0xFF  # mask for the primary code of an extended result code
_PROBE_BYTES: Final = 64 << 10
_log = logging.getLogger(__name__)


def sqlite_path(url: str) -> Path | None:
    """Return the path in sqlite:///PATH (four slashes for an absolute one); None for any other URL."""
    path = url.removeprefix("sqlite:///")
    return Path(path) if path and path != url else None


def table_names(database: sqlite3.Connection) -> list[str]:
    """Return the tables of a queue's file, sorted, without SQLite's own."""
    names = [str(row[0]) for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return [name for name in names if not name.startswith("sqlite_")]


class SqliteTransaction:
    """A connection inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, statements: Statements) -> None:
        self.statements = statements
        self.signals = Signals()
        self.tallies: Counter[str] = Counter()
        self.runs = RunTallies()
        self._connection = connection

    def rows(self, name: str, params: Params = {}) -> list[tuple[Any, ...]]:  # noqa: B006 - read only
        """All rows of the named query."""
        return self._connection.execute(self.statements[name], params).fetchall()

    def rows_of(self, sql: str, params: Params) -> list[tuple[Any, ...]]:
        """All rows of a composed query."""
        return self._connection.execute(sql, params).fetchall()

    def run(self, name: str, params: Params = {}) -> None:  # noqa: B006 - read only
        """Run the named statement."""
        self._connection.execute(self.statements[name], params)

    def changed(self, name: str, params: Params = {}) -> int:  # noqa: B006 - read only
        """Run the named statement; return how many rows it changed."""
        return self._connection.execute(self.statements[name], params).rowcount

    def run_many(self, name: str, params: Sequence[Params] | Sequence[Row]) -> None:
        """Run the named statement once for each of `params`."""
        if params:
            sql, in_order = self.statements.positional(name, params[0])
            self._connection.executemany(sql, map(in_order, params))

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Nothing to do: there is one writer."""

    def lock_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Nothing to do: there is one writer."""

    def write_tallies(self) -> None:
        """Write the counters; the last step of a transaction."""
        if self.tallies:
            self.run_many("tally_add", tally_changes(self.tallies))
        self.run_many("run_tally_add", self.runs.changes())
        if self.runs.deleted:  # deleted data must leave the file with this commit
            self.run("run_tallies_purge")


class _Waiting(NamedTuple):
    operation: Operation[Any]
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    future: asyncio.Future[Any]
    result: Any
    error: BaseException | None


class SqliteEngine(Instrumented):
    """An engine.Engine. Create it inside the event loop that uses it."""

    name = "sqlite"

    def __init__(self, path: Path, *, readers: int = 2) -> None:
        super().__init__()
        self._path = path
        self.where = f"sqlite:///{path}"
        self._statements = Statements()
        self._loop = asyncio.get_running_loop()
        self._lock = FileLock.hold(
            path.with_name(path.name + ".lock"),
            what=f"the queue's folder {path.parent}",
            taken=lambda pid: (
                f"the queue's database {path} is locked by another queue service (pid {pid}): stop that one, or choose another AGL_DATA_DIR"
            ),
        )
        try:
            connection = _open(path)
            _create_tables(connection, path)
        except BaseException:
            self._lock.close()
            raise
        self._waiting: deque[_Waiting] = deque()
        self._wake = threading.Semaphore(0)
        self._stopping = False
        self._local = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="queue-read")
        self._writer = threading.Thread(target=self._write_forever, args=(connection,), name="queue-write", daemon=True)
        self._writer.start()

    def now(self) -> float:
        """Return Unix seconds by this machine's clock."""
        return time.time()

    def write(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run an operation in the next group; durable when the future is done."""
        future: asyncio.Future[T] = self._timed("write", self._loop.create_future())
        if self._stopping:
            future.set_exception(UnavailableError("the queue is stopping: try again when it is back"))
            return future
        self._waiting.append(_Waiting(operation, future))
        self._wake.release()
        return future

    async def read(self, operation: Operation[T]) -> T:
        """Run an operation on a reader's connection, on a consistent snapshot."""
        return await self._timed("read", self._loop.run_in_executor(self._readers, self._read, operation))

    async def close(self) -> None:
        """Finish waiting writes, then close the file."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.release()
        await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._reader_connections:
            connection.close()
        self._lock.close()

    # --- the reader threads

    def _read(self, operation: Operation[T]) -> T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = _open(self._path, read_only=True)
            self._local.connection = connection
            self._reader_connections.append(connection)
        connection.execute("BEGIN")
        try:
            return operation(SqliteTransaction(connection, self._statements))
        except sqlite3.Error as error:
            raise _unavailable(error, self._path) from error
        finally:
            connection.execute("ROLLBACK")

    # --- the writer thread

    def _write_forever(self, connection: sqlite3.Connection) -> None:
        while True:
            self._wake.acquire()
            group: list[_Waiting] = []
            while self._waiting and len(group) < GROUP:
                waiting = self._waiting.popleft()
                if not waiting.future.cancelled():
                    group.append(waiting)
            if group:
                self._write_group(connection, group)
                if self._waiting:
                    self._wake.release()
            elif self._stopping:
                break
            if self._stopping:
                self._wake.release()
        connection.close()

    def _write_group(self, connection: sqlite3.Connection, group: list[_Waiting]) -> None:
        """Run the operations as one transaction, first without savepoints; if one raises, again with a savepoint for each."""
        signals = Signals()
        try:
            try:
                connection.execute("BEGIN IMMEDIATE")
                transaction = SqliteTransaction(connection, self._statements)
                outcomes = [_Outcome(waiting.future, waiting.operation(transaction), None) for waiting in group]
                transaction.write_tallies()
            except sqlite3.OperationalError:
                raise  # a full disk or a damaged file: SQLite may have rolled back already
            except Exception:  # noqa: BLE001 - the second pass delivers it to its own caller
                connection.execute("ROLLBACK")
                outcomes = self._run_each(connection, group, signals)
            else:
                connection.execute("COMMIT")
                signals = transaction.signals
        except sqlite3.Error as error:  # a full disk or a damaged file: no operation had an effect
            _log.error("queue database %s: %s; %d operations were refused", self._path, error, len(group))
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            failure = _unavailable(error, self._path)
            signals, outcomes = Signals(), [_Outcome(waiting.future, None, failure) for waiting in group]
        self._loop.call_soon_threadsafe(self._deliver, signals, outcomes)

    def _run_each(self, connection: sqlite3.Connection, group: list[_Waiting], signals: Signals) -> list[_Outcome]:
        """Run the group again, each operation under a savepoint, so that one that raises is undone without the others."""
        connection.execute("BEGIN IMMEDIATE")
        outcomes = [self._run_one(connection, waiting, signals) for waiting in group]
        connection.execute("COMMIT")
        return outcomes

    def _run_one(self, connection: sqlite3.Connection, waiting: _Waiting, signals: Signals) -> _Outcome:
        connection.execute("SAVEPOINT operation")
        transaction = SqliteTransaction(connection, self._statements)
        try:
            outcome = _Outcome(waiting.future, waiting.operation(transaction), None)
            transaction.write_tallies()
            signals.add(transaction.signals)
        except sqlite3.OperationalError:
            raise  # the whole group fails
        except sqlite3.IntegrityError as error:
            outcome = _Outcome(waiting.future, None, ConflictError(f"the queue's database refused a row: {error}"))
        except Exception as error:  # noqa: BLE001 - the boundary: an operation that fails must not fail the others
            outcome = _Outcome(waiting.future, None, error)
        if outcome.error is not None:
            connection.execute("ROLLBACK TO operation")
        connection.execute("RELEASE operation")
        return outcome

    def _deliver(self, signals: Signals, outcomes: list[_Outcome]) -> None:
        if signals:
            self._signal(signals)
        for future, result, error in outcomes:
            if future.cancelled():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


def _unavailable(error: sqlite3.Error, path: Path) -> AglError:
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_ERROR:  # a statement that does not fit the tables: disks, locks and damage have codes of their own
        return ConflictError(
            f"the queue's database {path} has other tables than this release of agl-otel ({error}): "
            "install the release that wrote it, or point AGL_QUEUE_URL or AGL_DATA_DIR elsewhere"
        )
    if code == sqlite3.SQLITE_FULL:
        return DiskFullError.of(f"the queue's database {path}", error)
    if code & _PRIMARY == sqlite3.SQLITE_IOERR and (why := _disk_full_error(path.parent)) is not None:
        return DiskFullError.of(f"the queue's database {path}", why.strerror)
    return UnavailableError(f"the queue's database {path} cannot be used now ({error}): check the disk's free space, then try again")


def _disk_full_error(folder: Path) -> OSError | None:
    """Write a small file in this folder; return the error if the disk or the user's quota is full, else None.

    SQLite reports only ENOSPC as a full disk; an exceeded quota (EDQUOT) looks like the I/O error of a broken disk.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return error if error.errno in FULL_DISK else None
    return None


def _open(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # deleted data is overwritten, as `rollouts delete` promises
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cache_size=-65536")
        if read_only:
            connection.execute("PRAGMA query_only=ON")
    except sqlite3.Error as error:
        raise _cannot_open(path, error) from None
    return connection


def _cannot_open(path: Path, error: sqlite3.Error) -> AglError:
    text = str(error)
    if "locked" in text:
        return InUseError(f"the queue's database {path} is locked by another program: close it there, or choose another AGL_DATA_DIR")
    if "not a database" in text or "malformed" in text:
        return ConflictError(f"{path} is not a usable queue database ({text}): move it away, or choose another AGL_QUEUE_URL")
    return SettingsError(f"cannot open the queue's database {path} ({text}): check its permissions, or choose another AGL_DATA_DIR")


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file. Raises ConflictError for another version, InUseError or SettingsError if it cannot be opened."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_migrations'").fetchall():
            for statement in schema.statements("sqlite"):
                connection.execute(statement)
            made = (schema.VERSION, "schema_sqlite.sql", time.time())
            connection.execute("INSERT INTO schema_migrations (version, name, applied_at) VALUES (?, ?, ?)", made)
        [(version,)] = connection.execute("SELECT coalesce(max(version), 0) FROM schema_migrations")
        schema.check_version(version, str(path))
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise _cannot_open(path, error) from None
    except AglError:
        connection.close()
        raise
