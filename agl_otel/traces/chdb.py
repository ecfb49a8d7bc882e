"""The embedded engine: ClickHouse inside this process (chdb), opened only by the collector.

Each connection serves one thread at a time: one is for statements, and each inserting or reading thread has its own, because reads on a
shared connection wait for inserts. Reading connections are limited and read-only; guard.py in the collector decides what may run on them.

A connection is discarded after a failed query: chdb keeps the rows that were ready before the error and prepends them to the answer of the
next query.

chdb ignores failed writes and only counts them (WriteBufferFromFileDescriptor), so on a full disk an insert or a merge succeeds with
truncated files. The engine therefore checks the counter after each writing statement, and periodically for merges. If it has grown, the
engine reloads all tables (no insert runs then, and those that overlapped with the failure fail, too): on loading, ClickHouse compares the
sizes of all files, detaches damaged parts and uses the sources of their merges instead (detached_parts.py), which chdb.xml makes it keep.
Merges and writes stop until the disk takes ROOM_BYTES again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

from agl_otel.errors import DiskFullError, SettingsError
from agl_otel.service.disk import try_disk
from agl_otel.service.lock import FileLock
from agl_otel.service.private import make_folder
from agl_otel.traces.detached_parts import DamagedPart, examine
from agl_otel.traces.engine import DATABASE, INSERT_SETTINGS, READ_SETTINGS, ClickHouseError, insert_into, parameter

_hidden: Final = {"pyarrow"} - sys.modules.keys()  # chdb does without it: no table is read here, and it takes 0.1 s and 20 MB
cast(dict[str, Any], sys.modules).update(dict.fromkeys(_hidden))
import chdb  # noqa: E402

for _name in _hidden:
    del sys.modules[_name]

READ_LIMITS: Final = {**READ_SETTINGS, "max_threads": 2}

CONFIG: Final = Path(__file__).with_name("chdb.xml")
ROOM_BYTES: Final = 4 << 20  # what the disk must take before ClickHouse writes to it
CUT_OFF_CODES: Final = {
    3: "UNEXPECTED_END_OF_FILE",
    32: "ATTEMPT_TO_READ_AFTER_EOF",
    33: "CANNOT_READ_ALL_DATA",
    40: "CHECKSUM_DOESNT_MATCH",
    107: "FILE_DOESNT_EXIST",
    228: "BAD_SIZE_OF_FILE_IN_DATA_PART",
    246: "CORRUPTED_DATA",
}
"""Errors of reading a part with a file that a full disk cut off."""
_FAILED_WRITES: Final = "SELECT value FROM system.events WHERE event = 'WriteBufferFromFileDescriptorWriteFailed'"
_TABLES: Final = f"SELECT name FROM system.tables WHERE database = '{DATABASE}' AND engine LIKE '%MergeTree'"
_PARTS: Final = (
    "SELECT table, name, if(level = 0 AND data_version = min_block_number AND modification_time >= toDateTime({since:UInt32}), 0, rows) "
    f"FROM system.parts WHERE database = '{DATABASE}' AND active"
)
"""Parts with their rows; 0 for those inserted since a time (Unix seconds)."""
_logger = logging.getLogger(__name__)


class _Result(Protocol):
    def bytes(self) -> bytes: ...


class _Connection(Protocol):
    def query(self, query: str, format: str, params: dict[str, str]) -> _Result: ...  # noqa: A002 chdb names it so
    def send_insert(self, query: str, format: str) -> Any: ...  # noqa: A002 chdb names it so
    def close(self) -> None: ...


class ChdbEngine:
    """One data directory. Raises InUseError if another process has it open."""

    cluster = ""
    embedded = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = FileLock.hold(
            directory.with_name(directory.name + ".lock"),
            what=f"the data directory {directory.parent}",
            taken=lambda pid: (
                f"the traces in {directory} are open in another process (pid {pid}): a collector runs on them; "
                "read through its ClickHouse port, or stop it first"
            ),
        )
        try:
            make_folder(directory)
        except OSError as error:
            raise SettingsError(f"cannot open the traces in {directory}: {error.strerror}") from None
        self._last_ok_at = time.time()
        self._loads = 0
        self._absent: set[str] = set()
        self._full: DiskFullError | None = None
        self._damaged: list[DamagedPart] = []
        self._readers_lock = _ReadersWriterLock()
        self._write_lock = threading.RLock()
        self._local = threading.local()
        self._readers: list[_Connection] = []
        self._inserters: list[_Connection] = []
        self._began: list[float] = []
        """When each write in progress began (Unix seconds)."""
        self._writer = self._connect(f"?config-file={CONFIG}")
        # chdb's own `default` database exposes the file system as tables (SELECT * FROM '/etc/passwd'): replace it by an empty one.
        with self._write_lock:
            self._failed_writes = self._count_failed()  # of this process: an engine before this one may have had some
            self._write("DROP DATABASE IF EXISTS default", "Null", None)
            self._write("CREATE DATABASE default ENGINE = Memory", "Null", None)
            self._examine({})

    def _connect(self, options: str = "") -> _Connection:
        try:
            return cast(_Connection, chdb.connect(f"{self.directory}{options}"))
        except RuntimeError as error:
            raise SettingsError(f"cannot open the traces in {self.directory}: {error}") from None

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement on the writing connection. Raises DiskFullError if the disk does not take what it writes."""
        with self._write_lock, self._writing(sql):
            self._write(sql, "Null", params)

    def check_disk(self) -> list[str]:
        """Return the problems of the disk and of the tables on it: a full disk, and damaged parts.

        Reloads tables with damaged parts, and resumes merges if there is room again. Call it more often than the sources of merges are
        removed (chdb.xml).
        """
        with self._write_lock:
            with contextlib.suppress(DiskFullError):
                self._notice(self._failed_writes)
                self._need_room()
            full = [str(self._full)] if self._full else []
            return full + [each.words for each in self._damaged if each.path.exists()]

    @contextlib.contextmanager
    def _writing(self, sql: str = "") -> Generator[None]:
        """Check the disk before and after a statement that may write.

        Raises DiskFullError if a write has failed meanwhile, whichever statement it belonged to: chdb does not say.
        """
        with self._write_lock:
            if not sql.startswith(("CREATE", "SYSTEM")):  # they do not wait for free space
                self._need_room()
            before = self._failed_writes
            self._began.append(began := time.time())
        try:
            yield
        finally:
            with self._write_lock:
                self._began.remove(began)
                self._notice(before)

    def _need_room(self) -> None:
        """Raise DiskFullError if the disk is full; resume merges if it no longer is."""
        if (free := shutil.disk_usage(self.directory).free) < ROOM_BYTES:
            self._full = self._no_room(f"{free} bytes are free")
            raise self._full
        if self._full is None:
            return
        try:
            try_disk(self.directory, ROOM_BYTES)
        except OSError as error:
            self._full = self._no_room(error.strerror)
            raise self._full from None
        self._load()
        for table in self._tables():
            self._ask(f"SYSTEM START MERGES {DATABASE}.{table}")
        self._full = None

    def _no_room(self, why: object) -> DiskFullError:
        return DiskFullError.of(f"the store of traces in {self.directory}", why)

    def _notice(self, before: int) -> None:
        """Raise DiskFullError if more than `before` writes of ClickHouse have failed; no table has a damaged part afterwards."""
        failed = self._count_failed()
        if failed == before:
            self._last_ok_at = min(self._began, default=time.time())
            return
        if failed == self._failed_writes:  # the tables have been reloaded since
            raise self._no_room(f"{failed - before} writes failed")
        self._full = self._no_room(f"{failed - self._failed_writes} writes failed")
        _logger.error("%s", self._full)
        self._failed_writes = failed
        known = {(str(table), str(part)): int(str(rows)) for table, part, rows in self._ask(_PARTS, {"since": int(self._last_ok_at)})}
        with self._readers_lock.exclusive():
            for table in self._tables():
                self._absent.add(table)
                self._ask(f"DETACH TABLE {DATABASE}.{table} SYNC")
            self._load()
            for table in self._tables():
                self._ask(f"SYSTEM STOP MERGES {DATABASE}.{table}")
        self._loads += 1
        self._examine(known)
        raise self._full

    def _count_failed(self) -> int:
        return sum(int(str(row[0])) for row in self._ask(_FAILED_WRITES))

    def _load(self) -> None:
        for table in sorted(self._absent):
            self._ask(f"ATTACH TABLE IF NOT EXISTS {DATABASE}.{table}")
            self._absent.discard(table)

    def _examine(self, known: Mapping[tuple[str, str], int]) -> None:
        before = self._damaged
        self._damaged = examine(self._ask, known)
        for each in self._damaged:
            if each not in before:
                _logger.error("%s", each.words)

    def _tables(self) -> list[str]:
        return [str(row[0]) for row in self._ask(_TABLES)]

    def delete(self, table: str, condition: str, params: Mapping[str, object]) -> None:
        """Delete matching rows. Deleted rows are invisible to queries when this returns."""
        self.command(f"DELETE FROM {DATABASE}.{table} WHERE {condition}", params)

    def insert(
        self, table: str, columns: Sequence[str], rows: Iterable[bytes], *, format_name: str = "JSONEachRow", token: str = ""
    ) -> None:
        """Insert the pieces of `rows`; on disk when this returns (the tables' fsync settings)."""
        settings = {**INSERT_SETTINGS, "insert_deduplication_token": token}
        given = ", ".join(f"{name} = {_quoted(str(value))}" for name, value in settings.items())
        connection = self._inserter()
        with self._writing(), self._readers_lock.shared():
            try:
                inserter = connection.send_insert(f"{insert_into(table, columns)} SETTINGS {given}", format_name)
                try:
                    for piece in rows:
                        inserter.append(piece)
                    inserter.finish()
                except BaseException:
                    inserter.cancel()  # else the connection would stay in the middle of this insert
                    raise
            except RuntimeError as error:
                raise ClickHouseError(str(error)) from None

    def _inserter(self) -> _Connection:
        """Return this thread's connection for inserts."""
        connection: _Connection | None = getattr(self._local, "inserter", None)
        if connection is None:
            with self._write_lock:
                self._local.inserter = connection = self._connect()
                self._inserters.append(connection)
        return connection

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """Return the rows of one of the program's own queries, on the writing connection."""
        with self._write_lock:
            return self._ask(sql, params)

    def _ask(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        return [json.loads(line) for line in self._write(sql, "JSONCompactEachRow", params).splitlines()]

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run SQL that the guard has accepted on this thread's read-only connection; `params` are already in ClickHouse's text form."""
        loads = self._loads
        try:
            return self._read(sql, format_name, params)
        except ClickHouseError as error:
            if error.code not in CUT_OFF_CODES:
                raise
            self.check_disk()
            if self._loads == loads:
                raise
        return self._read(sql, format_name, params)

    def _read(self, sql: str, format_name: str, params: Mapping[str, str] | None) -> bytes:
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._reader()
        try:
            with self._readers_lock.shared():
                return _run(connection, sql, format_name, None, raw=params)
        except ClickHouseError:
            with self._write_lock:
                self._readers.remove(connection)
                connection.close()
            self._local.connection = None
            raise

    def _write(self, sql: str, format_name: str, params: Mapping[str, object] | None) -> bytes:
        """Run SQL on the writing connection (the caller holds its lock); replace the connection after an error."""
        try:
            return _run(self._writer, sql, format_name, params)
        except ClickHouseError:
            failed, self._writer = self._writer, self._connect()  # opened first: the engine ends with its last connection
            failed.close()
            raise

    def _reader(self) -> _Connection:
        with self._write_lock:
            connection = self._connect()
            _run(connection, f"USE {DATABASE}", "Null")
            limits = ", ".join(f"{name} = {value}" for name, value in READ_LIMITS.items())
            _run(connection, f"SET {limits}, readonly = 2", "Null")  # 2, not 1: the guard adds settings that it allows
            self._readers.append(connection)
        self._local.connection = connection
        return connection

    def close(self) -> None:
        """Close all connections and release the directory; the reading threads must have ended."""
        with self._write_lock:
            for connection in [*self._readers, *self._inserters, self._writer]:
                connection.close()
            self._readers.clear()
            self._inserters.clear()
        self._lock.close()


class _ReadersWriterLock:
    """A readers-writer lock: `exclusive` waits for the readers inside, and later readers wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextlib.contextmanager
    def shared(self) -> Generator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None]:
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()


def _run(
    connection: _Connection, sql: str, format_name: str, params: Mapping[str, object] | None = None, raw: Mapping[str, str] | None = None
) -> bytes:
    values = dict(raw or {}) | {name: parameter(value) for name, value in (params or {}).items()}
    try:
        return connection.query(sql, format_name, params=values).bytes()
    except RuntimeError as error:
        raise ClickHouseError(str(error)) from None


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
