"""The collector on a ClickHouse server gives the same guarantees as on the embedded one, while the server stops and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.errors import QueryError, UnavailableError
from agl_otel.queue.client import QueueClient
from agl_otel.store import LightningStore
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.types import AttemptedRollout
from agl_otel.types.columns import Traces
from tests.clickhouse_server import PASSWORD, ClickHouseServer
from tests.command import run_command

from .otlp import post_on, post_spans, span_request
from .stack import Stack, new_stack, until
from .test_crash import KILLED_AT, check_acked_spans_are_stored_once, send_until_it_dies

pytestmark = pytest.mark.full


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ClickHouseServer]:
    """A server of the test's own, not started."""
    made = ClickHouseServer(tmp_path / "server")
    yield made
    made.kill()


@pytest.fixture
def on_server(tmp_path: Path, server: ClickHouseServer) -> Iterator[Stack]:
    """A stack that writes to the server, not started."""
    made = new_stack(tmp_path)
    made.settings = made.settings.model_copy(update={"clickhouse_url": server.url()})
    yield made
    made.close()


async def health(stack: Stack) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.http}/health") as response:
        assert response.status == 200
        return await response.json()


def ids(request: Any) -> set[str]:
    return {s.span_id.hex() for r in request.resource_spans for g in r.scope_spans for s in g.spans}


async def test_one_address_is_enough_and_the_password_stays_in_the_collector(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector()
    await post_spans(on_server, span_request([("ro-1", "at-1")], spans=3), ack="stored")
    async with on_server.reader() as reader:
        assert len(await reader.spans(["ro-1"])) == 3
    async with QueueClient(on_server.queue) as queue:
        described = await until(queue.describe, lambda described: bool(described.clickhouse))
    assert described.clickhouse == on_server.sql
    texts = f"{described} {await health(on_server)} {on_server.log.read_text()}"
    assert PASSWORD not in texts
    assert "s3cret" not in texts
    assert not (on_server.settings.data_dir / "traces").exists(), "no embedded ClickHouse is opened"


async def test_the_deadline_holds_with_a_frozen_or_dead_collector_or_frozen_clickhouse(
    on_server: Stack, server: ClickHouseServer, tmp_path: Path
) -> None:
    server.start()
    (tmp_path / "second").mkdir()
    second = new_stack(tmp_path / "second")
    shared = on_server.settings.model_dump(include={"queue_port", "clickhouse_url"})
    second.settings = second.settings.model_copy(update=shared)
    await on_server.start_queue()
    await on_server.start_collector()

    async def took(seconds: float, rollout: AttemptedRollout) -> tuple[Traces | str, float]:
        began = time.monotonic()
        async with asyncio.timeout(seconds + 15):  # far less than four deadlines
            try:
                found: Traces | str = await store.traces([rollout], deadline_seconds=seconds)
            except UnavailableError as error:
                found = str(error)
        return found, time.monotonic() - began

    try:
        async with await LightningStore.connect(on_server.queue) as store:
            rollout = await store.start_rollout(input=1)
            await post_spans(on_server, span_request([(rollout.rollout_id, rollout.attempt.attempt_id)], spans=3), ack="stored")
            found, _ = await took(5.0, rollout)
            assert isinstance(found, Traces)
            assert [verdict.kind for verdict in found.verdicts.values()] == ["unproven"]
            await second.start_collector()  # a reader asks collectors that register later, too
            frozen = second.processes["collector"]
            await until(store.queue.describe, lambda described: len(described.collectors) == 2)
            for state, number in (("frozen", signal.SIGSTOP), ("dead", signal.SIGKILL)):
                frozen.send_signal(number)
                answer = await took(5.0, rollout)
                if server.aborts:  # as the library does now and then when a client dies; it starts again
                    answer = await until(lambda: took(5.0, rollout), lambda answer: isinstance(answer[0], Traces))
                found, seconds = answer
                assert isinstance(found, Traces), found
                (verdict,) = found.verdicts.values()
                assert (verdict.kind, found.spans) == ("incomplete", 3), state
                assert any(second.http in reason for reason in verdict.reasons), state
                print(f"a collector {state}: answered after {seconds:.1f} of 5 s")
            await until(lambda: _alone(store), lambda alone: alone)
            server.signal(signal.SIGSTOP)
            found, seconds = await took(5.0, rollout)
            assert found == f"ClickHouse does not answer at {on_server.sql}"
            print(f"ClickHouse frozen: refused after {seconds:.1f} of 5 s")
            assert (await until(lambda: health(on_server), lambda found: found["status"] == "degraded"))["reason"]
            await post_spans(on_server, span_request([("ro-2", "at-2")], spans=2))
            for _ in range(3):  # waiting, and then in an insert that is tried again
                assert (await health(on_server))["backlog_rows"] == 2
                await asyncio.sleep(0.5)
            server.signal(signal.SIGCONT)
            await until(lambda: took(5.0, rollout), lambda answer: isinstance(answer[0], Traces))
    finally:
        second.close()


async def test_a_read_waits_until_its_deadline_for_a_clickhouse_that_restarts(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector()
    async with await LightningStore.connect(on_server.queue) as store:
        rollout = await store.start_rollout(input=1)
        await post_spans(on_server, span_request([(rollout.rollout_id, rollout.attempt.attempt_id)], spans=3), ack="stored")
        server.kill()
        with pytest.raises(UnavailableError):
            await store.traces([rollout], deadline_seconds=0)
        reading = asyncio.create_task(store.traces([rollout], deadline_seconds=300))
        await asyncio.to_thread(server.start)
        assert (await reading).spans == 3


async def _alone(store: LightningStore) -> bool:
    return len((await store.queue.describe()).collectors) == 1


async def test_other_databases_of_the_server_are_inaccessible(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    owner = ServerEngine(ServerAddress.parse(server.url()))
    owner.command("CREATE DATABASE other")
    owner.command("CREATE TABLE other.secrets (s String) ENGINE = MergeTree ORDER BY s AS SELECT 'the-canary-sings' AS s")
    owner.close()
    await on_server.start_queue()
    await on_server.start_collector()
    async with on_server.reader() as reader:
        for sql in (
            "SELECT * FROM other.secrets",
            "SELECT 1 AS `x, table_name: otel.otel_traces` FROM other.secrets",
            "SELECT (SELECT max(s) FROM other.secrets)",
            "SELECT upper((SELECT max(s) FROM other.secrets)) AS x",
            "SELECT count() FROM otel_traces WHERE SpanName IN other.secrets",
            "WITH x AS (SELECT * FROM other.secrets) SELECT * FROM x",
            "SELECT * FROM merge('other', '.*')",
            "SELECT * FROM system.query_log",
            "SELECT * FROM system.processes",
            "SELECT if((SELECT max(s) FROM other.secrets) = 'the-canary-sings', 1, throwIf(1))",
        ):
            with pytest.raises(QueryError) as refusal:
                await reader.query(sql)
            assert "the-canary-sings" not in str(refusal.value).replace(sql, "")
        assert (await reader.query("SELECT count() AS n FROM system.one"))[0]["n"] == 1


async def test_a_server_unavailable_at_the_start_gets_everything_later(on_server: Stack, server: ClickHouseServer) -> None:
    await on_server.start_queue()
    await on_server.start_collector()
    assert "does not answer" in (await until(lambda: health(on_server), lambda now: now["status"] == "degraded"))["reason"]
    await post_spans(on_server, span_request([("ro-1", "at-1")], spans=2))
    async with aiohttp.ClientSession() as session, session.post(on_server.sql, data="SELECT 1") as response:
        assert response.status == 503
    server.start()
    async with on_server.reader() as reader:
        await reader.barrier()
        assert len(await reader.spans(["ro-1"])) == 2
    await until(lambda: health(on_server), lambda now: now["status"] == "ok")


def agl_otel(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    done = run_command(arguments, os.environ)
    return done.returncode, (done.stdout + done.stderr).strip()


async def test_sql_says_within_seconds_that_clickhouse_is_dead_or_frozen(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector()
    asked = ("traces", "sql", "--store", on_server.queue, "SELECT count() AS n FROM otel_traces", "--json")
    await post_spans(on_server, span_request([("ro-1", "at-1")], spans=2), ack="stored")
    code, text = await asyncio.to_thread(agl_otel, *asked)
    assert (code, json.loads(text)) == (0, [{"n": 2}])

    async def refused_within(seconds: float) -> str:
        began = time.monotonic()
        code, text = await asyncio.to_thread(agl_otel, *asked)
        assert code == 1 and time.monotonic() - began < seconds, text
        return text

    server.signal(signal.SIGSTOP)
    assert "ClickHouse does not answer" in await refused_within(20)
    await post_spans(on_server, span_request([("ro-1", "at-1")], spans=2))
    code, text = await asyncio.to_thread(agl_otel, "collector", "status", "--store", on_server.queue)
    assert code == 1 and "degraded: ClickHouse at clickhouse://" in " ".join(text.split())
    for state in ("frozen", "dead"):
        text = await refused_within(25)
        assert "is in the collector's log and not stored yet" in text and "ClickHouse" in text, state
        server.kill()
    server.start()
    async with on_server.reader() as reader:
        await reader.barrier()
        assert len(await reader.spans(["ro-1"])) == 4


async def send(stack: Stack, client: int, done: asyncio.Event) -> set[str]:
    acked: set[str] = set()
    async with aiohttp.ClientSession() as session:
        number = 0
        while not done.is_set():
            request = span_request([(f"ro-{client}", f"at-{number % 3}"), (f"ro-{client}-{number}", "at-0")], spans=3)
            await post_on(session, stack, request)
            acked |= ids(request)
            number += 1
    return acked


async def test_a_server_killed_under_load_loses_and_duplicates_nothing(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector()
    done = asyncio.Event()
    clients = [asyncio.create_task(send(on_server, client, done)) for client in range(3)]
    for _ in range(3):
        written = (await health(on_server))["batches"]
        await until(lambda: health(on_server), lambda now, written=written: now["batches"] >= written + 3)
        server.kill()
        await until(lambda: health(on_server), lambda now: now["status"] == "degraded")
        server.start()
    done.set()
    acked = set[str]().union(*await asyncio.gather(*clients))
    async with on_server.reader() as reader:
        await reader.barrier()
        times = Counter(row["SpanId"] for row in await reader.query("SELECT SpanId FROM otel_traces"))
    assert acked == times.keys()
    assert max(times.values()) == 1


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [("writer", "wrong-s3cret", "refuses the user or the password"), ("nobody", PASSWORD, "GRANT ALL ON otel.* TO nobody")],
)
def test_a_server_that_refuses_access_ends_the_start_with_advice(
    user: str, password: str, message: str, on_server: Stack, server: ClickHouseServer
) -> None:
    server.start()
    on_server.settings = on_server.settings.model_copy(update={"clickhouse_url": server.url(user, password)})
    process: subprocess.Popen[bytes] = on_server.spawn("collector")
    assert process.wait(300) == 1
    log = on_server.log.read_text()
    assert message in log
    assert "s3cret" not in log
    assert "Traceback" not in log


async def test_a_second_collector_on_the_same_log_refuses_and_the_first_goes_on(on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector()
    ports: dict[str, int] = dict.fromkeys(("otlp_grpc_port", "otlp_http_port", "clickhouse_port"), 0)
    second = Stack(on_server.settings.model_copy(update=ports).with_ports(), on_server.log.with_name("second.log"))
    try:
        assert await asyncio.to_thread(second.spawn("collector").wait, 40) == 1
        log = second.log.read_text()
        assert "is another collector's" in log and "AGL_DATA_DIR" in log and "Traceback" not in log
        async with aiohttp.ClientSession() as session, session.get(f"{on_server.http}/health") as response:
            assert response.status == 200
    finally:
        second.close()


@pytest.mark.parametrize("point", ["batch-noted", "inserted"])
async def test_a_collector_killed_on_a_server_loses_and_duplicates_nothing(point: str, on_server: Stack, server: ClickHouseServer) -> None:
    server.start()
    await on_server.start_queue()
    await on_server.start_collector("-c", KILLED_AT.format(point=point, nth=4))
    acked: set[str] = set()
    await asyncio.gather(*(send_until_it_dies(on_server, acked, client) for client in range(3)))
    assert await asyncio.to_thread(on_server.processes["collector"].wait, 30) == -signal.SIGKILL
    await on_server.start_collector()
    await check_acked_spans_are_stored_once(on_server, acked)
