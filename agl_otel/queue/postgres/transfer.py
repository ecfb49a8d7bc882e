"""Moves a queue from SQLite to PostgreSQL, dumps it by pg_dump, and restores it by pg_restore.

SQLite and PostgreSQL have the same tables. A move copies them all except leases and service addresses, which only concern the services
that ran. pg_dump and pg_restore belong to PostgreSQL's client programs, which must be at least as new as the server.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from agl_otel.errors import ConflictError, DataError, SettingsError, UnavailableError
from agl_otel.queue.lifecycle import FINISHED
from agl_otel.queue.postgres.address import Address
from agl_otel.queue.postgres.schema import create_tables
from agl_otel.queue.schema import check_version
from agl_otel.queue.sqlite import table_names

LEFT: Final = frozenset({"schema_migrations", "leases", "services", "counters"})
"""Tables that a move leaves out. PostgreSQL replaces `counters` by its sequence `places`, set above every number in use."""
_HIGHEST: Final = (
    "SELECT max(n) FROM (SELECT max(ordinal) AS n FROM rollouts UNION ALL SELECT max(position) FROM rollouts UNION ALL "
    "SELECT max(ordinal) FROM resources)"
)
PLACE_BITS: Final = 24  # low bits of a place that do not come from the sequence (sql/postgres.sql)
_PATIENT: Final = b"SET idle_in_transaction_session_timeout = 0"  # the exported snapshot must live until pg_dump has imported it
_AS_THE_USER: Final = ("--no-owner", "--no-privileges")
_RAISE: Final = (
    "INSERT INTO sequences (rollout_id, last) VALUES (%s, %s) "
    "ON CONFLICT (rollout_id) DO UPDATE SET last = greatest(sequences.last, excluded.last)"
)
LastNumbers = Callable[[Sequence[str]], list[tuple[str, int]]]
"""Returns (rollout id, highest stored sequence number) for those of the given rollouts that have spans."""


def move(source: Path, url: str) -> dict[str, int]:
    """Copy the SQLite database at `source` (no service may be writing to it) to the PostgreSQL database at `url`. Returns {table: rows}.

    Raises ConflictError if either is of another release or the target holds rows, SettingsError for a wrong URL, UnavailableError if the
    server does not answer, DataError if rows are refused or missing on arrival; after an error nothing is kept.
    """
    address = Address.parse(url)
    with contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old, address.connect() as new:
        (version,) = old.execute("SELECT max(version) FROM schema_migrations").fetchone()
        check_version(version, str(source))
        create_tables(new, address)
        try:
            with new.transaction():
                moved = {table: _copy(old, new, table, address) for table in table_names(old) if table not in LEFT}
                (highest,) = old.execute(_HIGHEST).fetchone()
                new.execute("SELECT setval('places', %s)", (((highest or 0) >> PLACE_BITS) + 1,))
        except psycopg.OperationalError as error:
            raise UnavailableError(f"{address.shown} went away ({address.words(error)}): nothing was kept; try again") from None
        except psycopg.Error as error:
            raise DataError(f"{address.shown} does not take what is in {source} ({address.words(error)}); nothing was kept") from None
    return moved


def dump(url: str, target: Path) -> dict[str, Any]:
    """Write a consistent snapshot of the queue at `url` to `target` while its services go on.

    Returns {"schema": its name, "rows": {table: rows}}. Raises ConflictError if it is of another release, SettingsError, UnavailableError.
    """
    address = Address.parse(url)
    try:
        with address.connect(_PATIENT) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            schema, snapshot = _one(connection, "SELECT current_schema(), pg_export_snapshot()")
            (version,) = _one(connection, "SELECT coalesce(max(version), 0) FROM schema_migrations")
            check_version(int(version), address.shown)
            names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1").fetchall()
            rows = {str(name): _count(connection, str(name)) for (name,) in names}
            _run(address, "pg_dump", "--format=custom", f'--table="{schema}".*', f"--snapshot={snapshot}", f"--file={target}")
    except psycopg.Error as error:
        raise UnavailableError(f"{address.shown} cannot be copied ({address.words(error)}): try again") from None
    return {"schema": schema, "rows": rows}


def restore(source: Path, about: dict[str, Any], url: str, last_numbers: LastNumbers) -> None:
    """Restore a dump (`about` is what `dump` returned) into a schema of the same name that holds no queue.

    The sequence counters of unfinished rollouts are raised to `last_numbers`, so that no number is issued twice.
    Raises ConflictError, SettingsError, UnavailableError; after an error there is no queue.
    """
    address = Address.parse(url)
    with address.connect() as connection:
        (schema,) = _one(connection, "SELECT current_schema()")
        if schema != about["schema"]:
            raise ConflictError(
                f"the backup is of the schema {about['schema']!r} and {address.shown} names {schema!r}: "
                f"name a database with such a schema in AGL_QUEUE_URL (…?options=-csearch_path%3D{about['schema']})"
            )
        for table in about["rows"]:
            (there,) = _one(connection, "SELECT to_regclass(quote_ident(current_schema()) || '.' || quote_ident(%s))", table)
            if there is not None and table not in LEFT:
                _refuse_rows(connection, table, address)
    _run(address, "pg_restore", "--single-transaction", "--clean", "--if-exists", str(source))
    with address.connect() as connection:
        try:
            going = connection.execute("SELECT rollout_id FROM rollouts WHERE status <> ALL(%s)", (sorted(FINISHED),)).fetchall()
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(_RAISE, last_numbers([str(row[0]) for row in going]))
        except BaseException:
            for table in about["rows"].keys() - {"schema_migrations"}:
                connection.execute(sql.SQL("TRUNCATE TABLE {}").format(sql.Identifier(table)))
            raise


def _run(address: Address, program: str, *arguments: str) -> None:
    params = {name: value for name, value in address.params.items() if name != "password"}
    password = str(address.params.get("password", ""))
    environment = {**os.environ, **({"PGPASSWORD": password} if password else {})}
    command = [program, *_AS_THE_USER, *arguments, f"--dbname={make_conninfo(**params)}"]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SettingsError(f"{program} is missing: install PostgreSQL's client programs (Debian: apt install postgresql-client)") from None
    if done.returncode:
        raise UnavailableError(f"{program} failed on {address.shown}: {address.words(UserWarning(done.stderr))[:500]}")


def _copy(old: sqlite3.Connection, new: psycopg.Connection[Any], table: str, address: Address) -> int:
    columns = [str(row[1]) for row in old.execute(f'PRAGMA table_info("{table}")')]
    name = sql.Identifier(table)
    _refuse_rows(new, table, address)
    with new.cursor() as cursor, cursor.copy(
        sql.SQL("COPY {} ({}) FROM STDIN").format(name, sql.SQL(", ").join(map(sql.Identifier, columns)))
    ) as copy:  # fmt: skip
        for row in old.execute(f'SELECT {", ".join(columns)} FROM "{table}"'):
            copy.write_row(row)
    (sent,) = old.execute(f'SELECT count(*) FROM "{table}"').fetchone()
    if (arrived := _count(new, table)) != sent:
        raise DataError(f"{table}: {sent} rows were sent and {arrived} arrived; nothing was kept")
    return int(sent)


def _refuse_rows(connection: psycopg.Connection[Any], table: str, address: Address) -> None:
    if _count(connection, table):
        raise ConflictError(f"{address.shown} holds a queue already ({table} has rows), and nothing is overwritten: name an empty database")


def _count(connection: psycopg.Connection[Any], table: str) -> int:
    return int(_one(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))[0])


def _one(connection: psycopg.Connection[Any], query: Any, *values: Any) -> tuple[Any, ...]:
    row = connection.execute(query, values or None).fetchone()
    assert row is not None
    return row
