"""Brings a database to this release's schema. Several services may do it at once: the first does it, the others wait and find it done."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg import errors

from agl_otel.errors import ConflictError, SettingsError, UnavailableError
from agl_otel.queue.migrate import migrations, pending
from agl_otel.queue.postgres import dialect
from agl_otel.queue.postgres.address import Address

_OWN_SCHEMA = "give the queue a schema of its own (CREATE SCHEMA agl; then AGL_QUEUE_URL=…?options=-csearch_path%3Dagl)"


def migrate(connection: psycopg.Connection[Any], address: Address) -> str:
    """Apply what is missing, as one transaction; answers the name of the schema that holds the tables.

    Raises ConflictError where the schema is newer or somebody else's, SettingsError where the user may not create tables.
    """
    try:
        with connection.transaction():
            return _migrate(connection, address)
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
        raise UnavailableError(f"{address.shown} could not be migrated ({address.words(error)}): try again") from None


def _migrate(connection: psycopg.Connection[Any], address: Address) -> str:
    schema, encoding = _one(connection, b"SELECT current_schema(), current_setting('server_encoding')")
    if schema is None:
        raise SettingsError(f"{address.shown}: no schema of the search_path exists: {_OWN_SCHEMA}")
    if encoding != "UTF8":
        raise SettingsError(f"{address.shown} is encoded in {encoding} and cannot hold every text: CREATE DATABASE … ENCODING 'UTF8'")
    connection.execute(b"SELECT pg_advisory_xact_lock(hashtext('agl-otel queue'), hashtext(current_schema()))")
    [known] = _one(connection, b"SELECT to_regclass(quote_ident(current_schema()) || '.schema_migrations')")
    if known is None:
        connection.execute(
            b"CREATE TABLE schema_migrations (version BIGINT PRIMARY KEY, name TEXT NOT NULL, applied_at DOUBLE PRECISION NOT NULL)"
        )
    [applied] = _one(connection, b"SELECT coalesce(max(version), 0) FROM schema_migrations WHERE name LIKE '%.sql' AND applied_at >= 0")
    for migration in pending(applied, migrations(), address.shown):
        connection.execute(dialect.schema(migration.sql).encode())
        connection.execute(
            b"INSERT INTO schema_migrations (version, name, applied_at) VALUES (%s, %s, %s)",
            (migration.version, migration.name, time.time()),
        )
    return str(schema)


def _one(connection: psycopg.Connection[Any], sql: bytes) -> tuple[Any, ...]:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row
