"""Creates the queue's tables. If several services start at once, the first creates them and the others wait."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg import errors

from agl_otel.errors import ConflictError, SettingsError, UnavailableError
from agl_otel.queue import schema
from agl_otel.queue.postgres.address import Address

_OWN_SCHEMA = "give the queue a schema of its own (CREATE SCHEMA agl; then AGL_QUEUE_URL=…?options=-csearch_path%3Dagl)"


def create_tables(connection: psycopg.Connection[Any], address: Address) -> str:
    """Create the tables if there are none, in one transaction; return the name of their schema.

    Raises ConflictError if the tables are of another version or another program, SettingsError if the user may not create tables,
    UnavailableError if the server fails.
    """
    try:
        with connection.transaction():
            return _create_tables(connection, address)
    except errors.InsufficientPrivilege as error:
        raise SettingsError(
            f"{address.shown}: the user may not make the queue's tables ({address.words(error)}): as the owner, "
            f"GRANT CREATE ON SCHEMA public TO that user, or {_OWN_SCHEMA}"
        ) from None
    except (psycopg.ProgrammingError, psycopg.DataError) as error:
        raise ConflictError(
            f"{address.shown} holds tables of another program ({address.words(error)}): use another database, or {_OWN_SCHEMA}"
        ) from None
    except psycopg.Error as error:
        raise UnavailableError(f"{address.shown} could not be prepared ({address.words(error)}): try again") from None


def _create_tables(connection: psycopg.Connection[Any], address: Address) -> str:
    name, encoding = _one(connection, b"SELECT current_schema(), current_setting('server_encoding')")
    if name is None:
        raise SettingsError(f"{address.shown}: no schema of the search_path exists: {_OWN_SCHEMA}")
    if encoding != "UTF8":
        raise SettingsError(f"{address.shown} is encoded in {encoding} and cannot hold every text: CREATE DATABASE … ENCODING 'UTF8'")
    connection.execute(b"SELECT pg_advisory_xact_lock(hashtext('agl-otel queue'), hashtext(current_schema()))")
    [known] = _one(connection, b"SELECT to_regclass(quote_ident(current_schema()) || '.schema_migrations')")
    if known is None:
        for statement in schema.statements("postgres"):
            connection.execute(statement.encode())
        made = (schema.VERSION, "schema_postgres.sql", time.time())
        connection.execute(b"INSERT INTO schema_migrations (version, name, applied_at) VALUES (%s, %s, %s)", made)
    [version] = _one(connection, b"SELECT coalesce(max(version), 0) FROM schema_migrations WHERE name LIKE '%.sql' AND applied_at >= 0")
    schema.check_version(version, address.shown)
    return str(name)


def _one(connection: psycopg.Connection[Any], sql: bytes) -> tuple[Any, ...]:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row
