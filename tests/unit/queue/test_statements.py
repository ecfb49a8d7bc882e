"""The named queries: each is described and used, and sort fields are checked."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from agl_otel.errors import ConflictError, UsageError
from agl_otel.queue import schema
from agl_otel.queue.rows import InputRow
from agl_otel.queue.statements import Statements, page_clause

ROOM = Path(__file__).parents[3] / "agl_otel" / "queue"


def test_every_query_has_a_description_and_is_used() -> None:
    statements = Statements()
    code = "".join(path.read_text() for path in ROOM.rglob("*.py"))
    for name, description in statements.descriptions.items():
        assert description.endswith("."), name
        if not name.startswith("where_"):
            assert f'"{name}"' in code, f"nothing uses the query {name}"


def test_every_query_is_valid_sql_on_the_schema() -> None:
    statements = Statements()
    database = sqlite3.connect(":memory:")
    for statement in schema.statements("sqlite"):
        database.execute(statement)
    for name in statements.descriptions:
        sql = statements[name].replace("/*where*/", "").replace("/*page*/", "")
        if name.startswith("where_"):
            continue
        database.execute(f"EXPLAIN {sql}", dict.fromkeys(re.findall(r":(\w+)", sql)))
    database.close()


def test_a_claim_takes_its_order_from_the_index_without_sorting() -> None:
    database = sqlite3.connect(":memory:")
    for statement in schema.statements("sqlite"):
        database.execute(statement)
    plan = " ".join(str(row) for row in database.execute(f"EXPLAIN QUERY PLAN {Statements()['claimable_any']}", {"limit": 1}))
    database.close()
    assert "rollouts_queue" in plan
    assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize(
    ("limit", "offset", "expected"), [(-1, 0, ""), (0, 0, ""), (5, 0, " LIMIT 5 OFFSET 0"), (-1, 3, f" LIMIT {1 << 62} OFFSET 3")]
)
def test_a_page_is_limited_only_on_request(limit: int, offset: int, expected: str) -> None:
    assert page_clause("", {}, default="r.ordinal", descending=False, limit=limit, offset=offset) == "ORDER BY r.ordinal ASC" + expected


def test_a_field_that_cannot_be_sorted_by_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="cannot sort by 'input': use one of mode"):
        page_clause("input", {"mode": "r.mode"}, default="r.ordinal", descending=False, limit=-1, offset=0)


@pytest.mark.parametrize("version", [0, schema.VERSION + 1])
def test_tables_of_another_version_are_refused_with_their_place_and_the_remedy(version: int) -> None:
    with pytest.raises(ConflictError, match=f"data/queue.db has schema version {version}, .* has 1: install the release"):
        schema.check_version(version, "data/queue.db")


def test_numbered_parameters_follow_the_order_of_first_use() -> None:
    sql, in_order = Statements().positional("tally_add", {})
    assert ":" not in sql and sql.count("?1") == 1 and sql.count("?2") == 2
    assert tuple(in_order({"change": 3, "name": "attempts"})) == ("attempts", 3)


def test_a_row_is_bound_by_the_names_of_its_fields() -> None:
    row = InputRow(7, '"task"')
    _, in_order = Statements().positional("input_update", row)
    assert tuple(in_order(row)) == ('"task"', 7)
