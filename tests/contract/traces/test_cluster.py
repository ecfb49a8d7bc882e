"""Two servers as two shards: the same writer, the same readers, one rollout on one shard."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from aiohttp import web

from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.errors import UsageError
from agl_otel.traces import transfer
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.cluster import Cluster
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.retention import apply_retention
from agl_otel.traces.schema import create_schema, statements
from agl_otel.traces.sql import REFILLS, named_query
from agl_otel.types import Attempt, Rollout
from tests.clickhouse_cluster import two_shards
from tests.clickhouse_server import ClickHouseServer

ROLLOUTS = 20


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClickHouseServer]]:
    with two_shards(tmp_path_factory.mktemp("shards")) as made:
        yield made


@pytest.fixture
def shards(servers: list[ClickHouseServer]) -> Iterator[list[ServerEngine]]:
    """Both nodes with the schema. There is no Keeper here, so each is asked on its own instead of ON CLUSTER."""
    made = [ServerEngine(ServerAddress.parse(server.url(cluster="agl", replicated="0"))) for server in servers]
    for engine in made:
        engine.command("DROP DATABASE IF EXISTS otel SYNC")
        create_schema(engine, where="the test", cluster=Cluster("agl", replicated=False, everywhere=False))
    rows = [
        {"Timestamp": f"1750000000.{n:09d}", "TraceId": f"t{r}", "SpanId": f"s{n}", "SpanName": "work", "RolloutId": f"ro-{r}",
         "AttemptId": "at-1", "SequenceId": n + 1, "SpanAttributes": {"agentlightning.process": "p"}, "BatchId": 7, "BatchPos": r * 3 + n}
        for r in range(ROLLOUTS) for n in range(3)
    ]  # fmt: skip
    made[0].insert("otel.otel_traces", list(rows[0]), ["\n".join(json.dumps(row) for row in rows).encode()])
    yield made
    for engine in made:
        engine.close()


def test_rollouts_are_spread_and_each_is_on_one_shard(shards: list[ServerEngine]) -> None:
    local = [{row[0] for row in engine.select("SELECT DISTINCT RolloutId FROM otel.otel_traces_local")} for engine in shards]
    assert all(local), "both shards hold some"
    assert not local[0] & local[1]
    for engine in shards:
        assert engine.select("SELECT count(), uniqExact(BatchPos) FROM otel.otel_traces WHERE BatchId = 7") == [
            [3 * ROLLOUTS, 3 * ROLLOUTS]
        ]
        assert engine.select("SELECT sum(Spans) FROM otel.rollout_summary") == [[3 * ROLLOUTS]]


def test_views_are_refilled_through_either_node(shards: list[ServerEngine]) -> None:
    for engine in shards:
        engine.command("TRUNCATE TABLE otel.rollout_summary_states_local")
    for name in REFILLS:
        shards[1].command(named_query(name), {"batch": 7})
    assert shards[0].select("SELECT count(), sum(Spans) FROM otel.rollout_summary") == [[ROLLOUTS, 3 * ROLLOUTS]]


async def test_readers_see_one_database(shards: list[ServerEngine]) -> None:
    endpoint = SqlEndpoint(shards[1], shared=True)
    runner = web.AppRunner(endpoint.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with TraceReader(f"http://127.0.0.1:{runner.addresses[0][1]}") as reader:
        rollouts = [Rollout(rollout_id=f"ro-{n}", input=None, start_time=0.0) for n in range(ROLLOUTS)]
        attempts = [Attempt(rollout_id=r.rollout_id, attempt_id="at-1", sequence_id=1, start_time=0.0, seals={"p": 3}) for r in rollouts]
        traces = await reader.traces(rollouts, attempts, barrier=False)
        assert {verdict.kind for verdict in traces.verdicts.values()} == {"complete"}
        assert len(await reader.spans([f"ro-{n}" for n in range(ROLLOUTS)])) == 3 * ROLLOUTS
    await runner.cleanup()
    endpoint.close()


SECRET = "s3cret"
DESCRIBING = (
    "SELECT DISTINCT name FROM otel.otel_traces AS t JOIN system.databases AS d ON 1 = 1",
    "SELECT DISTINCT SpanName, (SELECT groupArray(comment) FROM system.tables) FROM otel.otel_traces",
    "SELECT DISTINCT partition FROM system.parts AS p CROSS JOIN otel.otel_traces AS t",
    "SELECT DISTINCT create_query FROM otel.otel_traces, system.functions",
    f"SELECT if(count() > 0, '{SECRET}', '') FROM otel.otel_traces WHERE '{SECRET}' IN (SELECT partition FROM system.parts)",
    f"SELECT if(count() > 0, '{SECRET}', '') FROM otel.otel_traces WHERE '{SECRET}' GLOBAL IN (SELECT partition FROM system.parts)",
    f"SELECT if(count() > 0, '', '{SECRET}') FROM otel.otel_traces WHERE 'zz_theirs' NOT IN (SELECT database FROM system.tables)",
)


def test_what_describes_a_node_is_filtered_in_queries_of_all_nodes(shards: list[ServerEngine]) -> None:
    for engine in shards:
        engine.command("CREATE DATABASE zz_theirs")
        table = f"(name String DEFAULT '{SECRET}') ENGINE = MergeTree PARTITION BY name ORDER BY () COMMENT '{SECRET}'"
        engine.command(f"CREATE TABLE zz_theirs.wages {table}")
        engine.command("INSERT INTO zz_theirs.wages VALUES (DEFAULT)")
        engine.command(f"CREATE OR REPLACE FUNCTION canary AS (x) -> concat(x, '{SECRET}')")
    endpoint = SqlEndpoint(shards[1], shared=True)
    try:
        for sql in DESCRIBING:
            answer = endpoint.run(sql, {}, {}, "TSV")[0].decode()
            assert not [word for word in (SECRET, "zz_theirs") if word in answer], sql
    finally:
        endpoint.close()
        for engine in shards:
            engine.command("DROP DATABASE zz_theirs SYNC")
            engine.command("DROP FUNCTION canary")


def test_retention_is_set_on_the_local_tables(shards: list[ServerEngine]) -> None:
    cluster = Cluster("agl", replicated=False, everywhere=False)
    assert "otel_traces_local" in apply_retention(shards[0], 30, cluster)
    assert apply_retention(shards[0], 30, cluster) == []


def test_replicated_tables_are_made_under_one_path_for_each_shard(servers: list[ClickHouseServer]) -> None:
    """As far as this server goes: it takes the DDL with a Keeper inside, and has no port for replicas, so nothing is written."""
    engine = ServerEngine(ServerAddress.parse(servers[0].url(cluster="agl")))
    cluster = Cluster("agl", replicated=True, everywhere=False)
    bookkeeping = "CREATE TABLE IF NOT EXISTS otel.agl_migrations (Version UInt32, Name String) ENGINE = MergeTree ORDER BY Version"
    try:
        engine.command("DROP DATABASE IF EXISTS otel SYNC")
        engine.command("CREATE DATABASE otel")
        for statement in [bookkeeping, *statements()]:
            for each in cluster.statements(statement):
                engine.command(each)
        replicas = {
            str(table): (path, replica)
            for table, path, replica in engine.select("SELECT table, zookeeper_path, replica_name FROM system.replicas")
        }
        plain = engine.select(
            "SELECT name FROM system.tables WHERE database = 'otel' AND engine LIKE '%MergeTree' AND engine NOT LIKE 'Repl%'"
        )
        assert plain == []
        assert replicas.pop("agl_migrations") == ("/clickhouse/tables/all/otel/agl_migrations", "1-r1")
        assert replicas["otel_traces_local"] == ("/clickhouse/tables/1/otel/otel_traces", "r1")
        assert all(table.endswith("_local") and replica == "r1" for table, (_, replica) in replicas.items())
    finally:
        engine.command("DROP DATABASE IF EXISTS otel SYNC")
        engine.close()


def test_a_missing_shard_is_a_retryable_error(shards: list[ServerEngine], servers: list[ClickHouseServer]) -> None:
    servers[1].kill()
    rows = "\n".join(json.dumps({"RolloutId": f"ro-{n}", "SpanId": f"x{n}", "BatchId": 8, "BatchPos": n}) for n in range(ROLLOUTS)).encode()
    try:
        with pytest.raises(ClickHouseError) as failure:
            shards[0].insert("otel.otel_traces", ["RolloutId", "SpanId", "BatchId", "BatchPos"], [rows])
    finally:
        servers[1].start()
    assert not failure.value.is_data_error
    shards[0].insert("otel.otel_traces", ["RolloutId", "SpanId", "BatchId", "BatchPos"], [rows])
    assert shards[1].select("SELECT uniqExact(BatchPos) FROM otel.otel_traces WHERE BatchId = 8") == [[ROLLOUTS]]


def test_a_cluster_is_backed_up_by_its_own_means(shards: list[ServerEngine], tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UsageError, match="BACKUP"):
        transfer.dump(shards[0], tmp_path_factory.mktemp("dump") / "x")
