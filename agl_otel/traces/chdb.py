"""The embedded engine: ClickHouse inside this process (chdb), opened only by the collector.

Each connection serves one thread at a time: one is for writing, and each reading thread has its own, because reads on a shared
connection wait for inserts. Reading connections are limited and read-only; guard.py in the collector decides what may run on them.

A connection is discarded after a failed query: chdb keeps the rows that were ready before the error and prepends them to the answer of the
next query.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast
from uuid import uuid4

import chdb

from agl_otel.errors import SettingsError
from agl_otel.service.lock import FileLock
from agl_otel.service.private import make_folder
from agl_otel.traces.engine import DATABASE, INSERT_SETTINGS, READERS_SEE, ClickHouseError, map_literal, parameter

# Limits of one read, set before readonly, so that no query can change them.
READ_LIMITS: Final = {
    "max_memory_usage": 2 << 30,
    "max_execution_time": 60,
    "max_result_rows": 20_000_000,
    "max_result_bytes": 1 << 30,
    "max_threads": 2,
    "merge_tree_min_rows_for_concurrent_read": 16_384,  # some hundred rollouts, each one granule, should be read by both threads
    "output_format_json_quote_64bit_integers": 0,
    "additional_table_filters": map_literal(READERS_SEE),
}


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
        make_folder(directory)
        self._writer = self._connect()
        self._write_lock = threading.Lock()
        self._local = threading.local()
        self._readers: list[_Connection] = []
        # chdb's own `default` database exposes the file system as tables (SELECT * FROM '/etc/passwd'): replace it by an empty one.
        self.command("DROP DATABASE IF EXISTS default")
        self.command("CREATE DATABASE default ENGINE = Memory")

    def _connect(self) -> _Connection:
        try:
            return cast(_Connection, chdb.connect(str(self.directory)))
        except RuntimeError as error:
            raise SettingsError(f"cannot open the traces in {self.directory}: {error}") from None

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement on the writing connection."""
        with self._write_lock:
            self._write(sql, "Null", params)

    def delete(self, table: str, condition: str, params: Mapping[str, object]) -> None:
        """Delete matching rows. Deleted rows are invisible to queries when this returns."""
        self.command(f"DELETE FROM {DATABASE}.{table} WHERE {condition}", params)

    def insert(self, table: str, columns: Sequence[str], rows: bytes, *, token: str = "") -> None:
        """Insert JSONEachRow `rows`; on disk when this returns (the tables' fsync settings)."""
        self._insert(f"INSERT INTO {table} ({', '.join(columns)})", {"insert_deduplication_token": token}, "JSONEachRow", rows)

    def insert_protobuf(self, table: str, schema: Path, data: bytes, *, token: str = "") -> None:
        """Insert length-delimited messages `Request` of the .proto file `schema`; on disk when this returns."""
        settings = {
            "format_schema": f"{schema}:Request",  # by file name: a text would be cached in the current directory
            "input_format_protobuf_oneof_presence": 1,
            "insert_deduplication_token": token,
        }
        self._insert(f"INSERT INTO {table}", settings, "Protobuf", data)

    def insert_native(self, table: str, blocks: bytes) -> None:
        """Insert blocks of the Native format, which name their columns; on disk when this returns."""
        token = str(uuid4())  # unique: blocks are never resent, and chunks of equal content must all be stored
        self._insert(f"INSERT INTO {table}", {"insert_deduplication_token": token}, "Native", blocks)

    def _insert(self, sql: str, settings: Mapping[str, str | int], format_name: str, data: bytes) -> None:
        given = ", ".join(f"{name} = {_quoted(str(value))}" for name, value in {**INSERT_SETTINGS, **settings}.items())
        with self._write_lock:
            try:
                inserter = self._writer.send_insert(f"{sql} SETTINGS {given}", format_name)
                try:
                    inserter.append(data)
                    inserter.finish()
                except RuntimeError:
                    inserter.cancel()  # else the connection would stay in the middle of this insert
                    raise
            except RuntimeError as error:
                raise ClickHouseError(str(error)) from None

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """Return the rows of one of the program's own queries, on the writing connection."""
        with self._write_lock:
            data = self._write(sql, "JSONCompactEachRow", params)
        return [json.loads(line) for line in data.splitlines()]

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run SQL that the guard has accepted on this thread's read-only connection; `params` are already in ClickHouse's text form."""
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._reader()
        try:
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
            for connection in [*self._readers, self._writer]:
                connection.close()
            self._readers.clear()
        self._lock.close()


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
