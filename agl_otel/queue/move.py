"""A queue from SQLite to PostgreSQL and, for a backup, the other way, with all that it knows: one transaction, counted on both sides.

Both have the same tables (sql/schema_*.sql). What only the process that ran knows is not carried: leases, and where services are.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from agl_otel.errors import ConflictError, DataError, UnavailableError
from agl_otel.queue import schema
from agl_otel.queue.postgres.address import Address
from agl_otel.queue.postgres.schema import create_tables
from agl_otel.queue.sqlite import new_database, table_names

LEFT: Final = frozenset({"schema_migrations", "leases", "services", "counters"})
"""Tables that are not carried: PostgreSQL numbers by a sequence of its own (`places`), which begins above all that is there."""
_HIGHEST: Final = (
    "SELECT max(n) FROM (SELECT max(ordinal) AS n FROM rollouts UNION ALL SELECT max(position) FROM rollouts UNION ALL "
    "SELECT max(ordinal) FROM resources)"
)
FETCHED: Final = 2_000  # rows that are read at a time
PLACE_BITS: Final = 24  # of a number that the sequence does not give (sql/postgres.sql)


def move(source: Path, url: str) -> dict[str, int]:
    """Copy the SQLite database at `source`, which nobody writes to, into the PostgreSQL database at `url`. Returns {table: rows}.

    Raises ConflictError where either is of another release or the target holds rollouts, SettingsError for a wrong URL, UnavailableError
    where the server does not answer, DataError where what arrived is not what was sent; then nothing is there.
    """
    address = Address.parse(url)
    with contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old, address.connect() as new:
        _check_release(old, source)
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


def fetch(url: str, target: Path) -> dict[str, int]:
    """Copy the queue in the PostgreSQL database at `url`, as it is at one moment, to a new SQLite file. Returns {table: rows}.

    Services may go on with it meanwhile. Raises ConflictError where it is of another release, SettingsError, UnavailableError, DataError.
    """
    address = Address.parse(url)
    with contextlib.closing(new_database(target)) as new, address.connect() as old:
        try:
            with old.transaction(), new:
                old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                (version,) = old.execute("SELECT coalesce(max(version), 0) FROM schema_migrations").fetchone() or (0,)
                schema.check_version(int(version), address.shown)
                found = {table: _fetch(old, new, table) for table in table_names(new) if table not in LEFT}
                (highest,) = new.execute(_HIGHEST).fetchone()
                new.execute("INSERT INTO counters (name, last) VALUES ('place', ?)", (highest or 0,))
        except psycopg.OperationalError as error:
            raise UnavailableError(f"{address.shown} went away ({address.words(error)}): try again") from None
        except (psycopg.Error, sqlite3.Error) as error:
            raise DataError(f"what is in {address.shown} cannot be copied: {error}") from None
    return found


def _fetch(old: psycopg.Connection[Any], new: sqlite3.Connection, table: str) -> int:
    columns = [str(row[1]) for row in new.execute(f'PRAGMA table_info("{table}")')]
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    insert = f'INSERT INTO "{table}" ({", ".join(columns)}) VALUES ({", ".join("?" * len(columns))})'
    with old.cursor(name="fetch") as cursor:
        cursor.itersize = FETCHED
        new.executemany(insert, cursor.execute(sql.SQL("SELECT {} FROM {}").format(names, sql.Identifier(table))))
    sent = _count(old.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))))
    if (arrived := _count(new.execute(f'SELECT count(*) FROM "{table}"'))) != sent:
        raise DataError(f"{table}: {sent} rows were read and {arrived} arrived")
    return sent


def _check_release(old: sqlite3.Connection, source: Path) -> None:
    (version,) = old.execute("SELECT max(version) FROM schema_migrations").fetchone()
    schema.check_version(version, str(source))


def _copy(old: sqlite3.Connection, new: psycopg.Connection[Any], table: str, address: Address) -> int:
    columns = [str(row[1]) for row in old.execute(f'PRAGMA table_info("{table}")')]
    name = sql.Identifier(table)
    if _count(new.execute(sql.SQL("SELECT count(*) FROM {}").format(name))):
        raise ConflictError(f"{address.shown} holds a queue already ({table} has rows), and nothing is overwritten: name an empty database")
    with new.cursor() as cursor, cursor.copy(
        sql.SQL("COPY {} ({}) FROM STDIN").format(name, sql.SQL(", ").join(map(sql.Identifier, columns)))
    ) as copy:  # fmt: skip
        for row in old.execute(f'SELECT {", ".join(columns)} FROM "{table}"'):
            copy.write_row(row)
    sent = _count(old.execute(f'SELECT count(*) FROM "{table}"'))
    if (arrived := _count(new.execute(sql.SQL("SELECT count(*) FROM {}").format(name)))) != sent:
        raise DataError(f"{table}: {sent} rows were sent and {arrived} arrived; nothing was kept")
    return sent


def _count(rows: Iterable[Any]) -> int:
    return int(next(iter(rows))[0])
