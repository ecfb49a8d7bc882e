"""The rewriting of the shared SQL for PostgreSQL, and the parsing of its URL; no server is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agl_otel import queue
from agl_otel.queue.statements import FILES, Statements

pytest.importorskip("psycopg", reason="pip install 'agl-otel[postgres]'")

from agl_otel.queue.postgres import dialect, session
from agl_otel.queue.postgres.address import Address
from agl_otel.queue.postgres.session import rows_json


def test_no_idiom_of_sqlite_is_left() -> None:
    statements = dialect.statements()
    for name in statements.descriptions:
        sql = statements[name]
        assert not any(word in sql for word in ("INDEXED BY", "json_each(", "instr(", " max(", ":now"))
        assert sql.count("%") == sql.count("%("), name


def test_overridden_queries_exist_or_concern_locks() -> None:
    shared, ours = set(Statements(FILES).descriptions), set(Statements(("postgres.sql",)).descriptions)
    assert ours - shared == {"keys_held", "rollouts_held"}


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


def test_rows_are_sent_as_json_without_values_that_postgres_cannot_hold() -> None:
    assert json.loads(rows_json([{"a": "x\0y", "b": float("inf")}, {"a": "\\u0000", "b": 0.1}])) == [
        {"a": "x\ufffdy", "b": "inf"},
        {"a": "\\u0000", "b": 0.1},
    ]
    assert json.loads(rows_json([{"a": "ä\0", "b": None}])) == [{"a": "ä\ufffd", "b": None}]
    assert rows_json([{"a": "ä", "b": 1 << 60}]) == '[{"a":"ä","b":1152921504606846976}]'


def test_statements_for_all_rows_are_never_run_by_name_for_one() -> None:
    statements = dialect.statements()
    at_once = {name for name in statements.descriptions if session.ROWS in statements[name]}
    assert at_once == {
        "rollout_insert",
        "input_insert",
        "rollout_attempted",
        "rollout_status",
        "attempt_insert",
        "attempt_save",
        "tally_add",
        "run_tally_add",
        "answer_remember",
        "worker_busy",
        "worker_free",
    }
    sources = "".join(path.read_text() for path in Path(queue.__file__).parent.rglob("*.py"))
    assert not {name for name in at_once if f'.run("{name}"' in sources or f'.changed("{name}"' in sources}
