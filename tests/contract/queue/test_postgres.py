"""Properties of the PostgreSQL engine only: startup errors, secrets, query plans, and lost notifications."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_otel.errors import AglError, ConflictError, SettingsError, UnavailableError, UsageError
from agl_otel.queue.client import AttemptUpdate, QueueClient, RolloutUpdate
from agl_otel.queue.engine import Transaction
from agl_otel.queue.operations import query as queries
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.server import open_engine
from agl_otel.queue.statements import FILES, Statements
from agl_otel.settings import free_port
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue
from tests.postgres_server import Postgres

PASSWORD = "pa@ss/wo#rd"
psycopg = pytest.importorskip("psycopg")


@pytest.fixture(scope="module")
def guarded(postgres: Postgres) -> Postgres:
    """The server with a user who needs a password and may make nothing in the schema public."""
    postgres.sql(f"CREATE ROLE guarded LOGIN PASSWORD '{PASSWORD}'; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    return postgres


async def refusal(url: str) -> AglError:
    with pytest.raises(AglError) as caught:
        open_engine(url)
    assert PASSWORD not in str(caught.value)
    assert "wo#rd" not in str(caught.value)
    return caught.value


async def test_a_wrong_password_is_refused_with_the_setting(guarded: Postgres) -> None:
    for password in ("", "guess-" + PASSWORD):
        error = await refusal(guarded.url(user="guarded", password=password))
        assert isinstance(error, SettingsError)
        assert re.search(r"postgresql://guarded@.*refuses us .*correct user, password or database in AGL_QUEUE_URL", str(error))


async def test_missing_rights_are_named_with_the_remedy(guarded: Postgres) -> None:
    error = await refusal(guarded.url(user="guarded", password=PASSWORD))
    assert isinstance(error, SettingsError)
    assert re.search(r"permission denied for schema public.*GRANT CREATE ON SCHEMA", str(error))


async def test_a_missing_database_or_schema_is_named(postgres: Postgres) -> None:
    assert 'database "nowhere" does not exist' in str(await refusal(postgres.url(database="nowhere")))
    assert "no schema of the search_path exists" in str(await refusal(postgres.url("nowhere")))


async def test_a_server_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    for url in (f"postgresql://u:secret@/db?host={tmp_path}", f"postgres://u:secret@127.0.0.1:{free_port()}/db"):
        error = await refusal(url)
        assert isinstance(error, UnavailableError)
        assert re.search(r"postgresql://u@.*/db does not answer .*AGL_QUEUE_URL", str(error))
        assert "secret" not in str(error)


@pytest.mark.parametrize(
    "url", [f"postgresql://u:{PASSWORD}@h/db", "postgresql://u:p/wo#rd@h/db", "postgresql://u:wo#rd@h:x/db", "postgresql://[/db"]
)
async def test_a_url_that_cannot_be_read_is_refused_without_repeating_it(url: str) -> None:
    assert "percent-encoded" in str(await refusal(url))


async def test_an_unknown_database_is_refused_without_its_password() -> None:
    assert "mysql://… is not understood" in str(await refusal(f"mysql://u:{PASSWORD}@h/db"))


async def test_tables_of_another_program_are_left_alone(postgres: Postgres) -> None:
    url = postgres.new_schema()
    schema = url.rpartition("%3D")[2]
    postgres.sql(f"CREATE TABLE {schema}.schema_migrations (version TEXT)")
    error = await refusal(url)
    assert isinstance(error, ConflictError)
    assert re.search("another program.*schema of its own", str(error))


async def test_a_database_that_cannot_hold_every_text_is_refused(postgres: Postgres) -> None:
    postgres.sql("CREATE DATABASE narrow TEMPLATE template0 ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C'")
    assert "ENCODING 'UTF8'" in str(await refusal(postgres.url(database="narrow")))


async def test_the_password_is_in_no_message_and_no_log(guarded: Postgres, tmp_path: Path) -> None:
    guarded.sql("CREATE SCHEMA theirs AUTHORIZATION guarded")
    port = free_port()
    url = guarded.url("theirs", user="guarded", password=PASSWORD)
    environment = {**os.environ, "AGL_QUEUE_URL": url, "AGL_QUEUE_PORT": str(port), "AGL_DATA_DIR": str(tmp_path), "AGL_LOG_LEVEL": "DEBUG"}
    command = [sys.executable, "-m", "agl_otel.queue"]
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment, stderr=asyncio.subprocess.PIPE)
    async with QueueClient(f"127.0.0.1:{port}", retry_seconds=300) as client:
        await client.enqueue([EnqueueRolloutRequest(input=1)])
        guarded.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'guarded'")
        assert (await client.statistics())["total_rollouts"] == 1
    process.terminate()
    _, log = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0
    assert b"with postgresql://guarded@" in log
    assert PASSWORD.encode() not in log
    assert b"pa%40ss" not in log


async def test_cut_connections_are_replaced_and_missed_signals_made_up_for(postgres: Postgres) -> None:
    url = postgres.new_schema()
    async with LocalQueue(url) as a, LocalQueue(url) as b:
        claim = asyncio.create_task(b.client.claim(wait_seconds=30))
        while not b.server.service.claims_waiting:  # noqa: ASYNC110 - in one loop with the service: a turn each
            await asyncio.sleep(0)
        [started] = await a.client.start([EnqueueRolloutRequest(input=1)])
        ended = asyncio.ensure_future(anext(b.client.wait([started.rollout_id])))
        await b.until_awaited(1)
        postgres.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'agl-otel queue'")
        await a.client.update_rollouts([RolloutUpdate(rollout_id=started.rollout_id, status="cancelled")])
        await a.client.enqueue([EnqueueRolloutRequest(input="x")])
        await b.sweep()
        async with asyncio.timeout(300):
            assert [c.input for c in await claim] == ["x"]
            assert [r.status for r in await ended] == ["cancelled"]


async def test_text_that_postgresql_cannot_hold_is_kept_with_replacements(postgres: Postgres) -> None:
    async with LocalQueue(postgres.new_schema()) as queue:
        [started] = await queue.client.start([EnqueueRolloutRequest(input={"nul": "\0", "text": "ü€😀"})], worker_id="w%s")
        assert started.input == {"nul": "\0", "text": "ü€😀"}
        update = AttemptUpdate(rollout_id=started.rollout_id, attempt_id="latest", status="failed", error="a\0b")
        assert [a.error for a in await queue.client.update_attempts([update])] == ["a\0b"]
        [attempt] = await queue.client.query_attempts([started.rollout_id])
        assert attempt.error == "a\ufffdb"
        with pytest.raises(UsageError, match="cannot hold a value"):
            await queue.client.query_attempts(["\0"])
        assert len(await queue.client.query_rollouts()) == 1


async def test_every_query_is_valid_and_a_claim_takes_its_order_from_the_index(postgres: Postgres) -> None:
    engine = open_engine(postgres.new_schema())

    def explain(tx: Transaction, name: str) -> str:
        sql = tx.statements[name].replace("/*where*/", "").replace("/*page*/", "")
        return " ".join(str(row[0]) for row in tx.rows_of(f"EXPLAIN {sql}", dict.fromkeys(re.findall(r"%\((\w+)\)s", sql))))

    for name in Statements((*FILES, "postgres.sql")).descriptions:
        if not name.startswith("where_"):
            plan = await engine.write(lambda tx, name=name: explain(tx, name))
            if name == "claimable_any":
                assert "using rollouts_queue" in plan
                assert "Sort" not in plan[plan.index("LockRows") :]  # above it only what is claimed is sorted
    await engine.close()


async def test_a_commit_is_on_disk_before_its_answer_whatever_the_servers_default(postgres: Postgres) -> None:
    url = postgres.new_schema()
    engine = open_engine(url.replace("options=", "options=-csynchronous_commit%3Doff%20"))
    assert await engine.write(lambda tx: tx.rows_of("SHOW synchronous_commit", {})) == [("on",)]
    await engine.close()


async def test_rollouts_queried_by_id_are_read_by_their_index(postgres: Postgres) -> None:
    """By their index in any sort order: a walk along many rollouts would take seconds."""
    asked: list[tuple[str, Any]] = []

    def plan(tx: Any) -> str:
        rows_of = tx.rows_of

        def noted(sql: str, params: Any) -> list[tuple[Any, ...]]:
            asked.append((sql, params))
            return rows_of(sql, params)

        tx.rows_of = noted
        queries.query_rollouts(tx, pb.QueryRolloutsRequest(filter=pb.Filter(id_in=["ro-1", "ro-2"], has_id_in=True)))
        [(sql, params)] = asked
        return "\n".join(row[0] for row in rows_of(f"EXPLAIN {sql}", params))

    async with LocalQueue(postgres.new_schema()) as queue:
        await queue.client.enqueue([EnqueueRolloutRequest(input=n) for n in range(2000)])
        plan_text = await queue.engine.read(plan)
    assert "rollouts_rollout_id_key" in plan_text
    assert "rollouts_pkey" not in plan_text
