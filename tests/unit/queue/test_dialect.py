"""How the shared SQL becomes PostgreSQL's, and how its URL is read: no server needed."""

from __future__ import annotations

import pytest

from agl_otel.queue.statements import FILES, Statements

pytest.importorskip("psycopg", reason="pip install 'agl-otel[postgres]'")

from agl_otel.queue.postgres import dialect
from agl_otel.queue.postgres.address import Address


def test_no_idiom_of_sqlite_is_left() -> None:
    statements = dialect.statements()
    for name in statements.descriptions:
        sql = statements[name]
        assert not any(word in sql for word in ("INDEXED BY", "json_each(", "instr(", " max(", ":now"))
        assert sql.count("%") == sql.count("%("), name


def test_what_is_overridden_exists_or_is_about_locks() -> None:
    shared, ours = set(Statements(FILES).descriptions), set(Statements(("postgres.sql",)).descriptions)
    assert ours - shared == {"key_held", "rollouts_held"}


def test_a_migration_gets_types_that_hold_as_much_and_sort_alike() -> None:
    sql = "-- TEXT\nCREATE TABLE t (\na INTEGER PRIMARY KEY,  -- REAL\nb REAL, c TEXT\n) WITHOUT ROWID;\n-- postgres: CREATE SEQUENCE s;"
    assert dialect.schema(sql) == (
        'CREATE TABLE t (\na BIGINT PRIMARY KEY,\nb DOUBLE PRECISION, c TEXT COLLATE "C"\n);\nCREATE SEQUENCE s;'
    )


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("postgresql://u:p%40s%2Fs@h:5433/db?sslmode=require", "postgresql://u@h:5433/db", "p@s/s"),
        ("postgres://u:p@ss@h/db", "postgresql://u@h/db", "p@ss"),
        ("postgresql://u@a:1,b:2/db", "postgresql://u@a,b/db", None),
        ("postgresql:///db?host=/run/pg&user=me&password=secret", "postgresql://me@/run/pg/db", "secret"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str, password: str | None) -> None:
    address = Address.parse(url)
    assert address.shown == shown
    assert address.params.get("password") == password
    assert "password" not in repr(address)
    if password:
        assert address.words(ValueError(f"cannot use\n {password}")) == "cannot use ***"
