"""Slow queries do not delay the stack's own readers, which have separate threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agl_otel.collector.sqlhttp import READ_THREADS, SqlEndpoint
from agl_otel.net.auth import scoped_token
from agl_otel.traces import chdb
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.http import OWN_HEADER, ClickHouseHttp
from agl_otel.traces.reader import TraceReader

pytestmark = pytest.mark.full

TOKEN = "s3cret"
SLOW = "SELECT sum(sipHash64(number)) FROM numbers(100000000000)"
SLOW_SECONDS = 20.0  # their time limit ends them


class Watched(ChdbEngine):
    """Counts the slow queries that are running."""

    running = begun = 0

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Read like the engine."""
        slow = sql.startswith("SELECT * FROM") and "sipHash64" in sql
        self.running, self.begun = self.running + slow, self.begun + slow
        try:
            return super().read(sql, format_name, params)
        finally:
            self.running -= slow


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setitem(chdb.READ_LIMITS, "max_execution_time", SLOW_SECONDS)
    made = Watched(tmp_path / "traces")
    made.command("CREATE DATABASE otel")
    yield made
    made.close()


@contextlib.asynccontextmanager
async def serving(engine: Watched, token: str) -> AsyncGenerator[str]:
    endpoint = SqlEndpoint(engine, token=token)
    runner = web.AppRunner(endpoint.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await asyncio.to_thread(endpoint.close)


@pytest.mark.parametrize("token", ["", TOKEN], ids=["open", "token"])
async def test_slow_queries_of_clients_do_not_delay_our_readers(engine: Watched, token: str) -> None:
    theirs = scoped_token(token, ["clickhouse"], 1e10) if token else ""
    claim = {"Authorization": f"Bearer {theirs}", OWN_HEADER: "1"} if token else {}  # without the stack's token it is not our reader
    async with serving(engine, token) as url, aiohttp.ClientSession() as session, TraceReader(url, token=token) as reader:
        slow = [asyncio.create_task(session.post(url, data=SLOW, headers=claim)) for _ in range(READ_THREADS + 2)]
        async with asyncio.timeout(60):
            while engine.running < READ_THREADS:  # noqa: ASYNC110 - the queries run in the endpoint's threads
                await asyncio.sleep(0.01)
        assert await reader.query("SELECT 1 AS one") == [{"one": 1}]
        assert engine.running == READ_THREADS and not any(task.done() for task in slow), "it was answered beside them"
        for task in slow:
            task.cancel()


async def test_queries_of_disconnected_clients_do_not_start(engine: Watched) -> None:
    async with serving(engine, "") as url, aiohttp.ClientSession() as session:
        slow = [asyncio.create_task(session.post(url, data=SLOW)) for _ in range(3 * READ_THREADS)]
        async with asyncio.timeout(60):
            while engine.running < READ_THREADS:  # noqa: ASYNC110 - the queries run in the endpoint's threads
                await asyncio.sleep(0.01)
        for task in slow:
            task.cancel()
        client = ClickHouseHttp(url)
        assert await client.fetch("SELECT 1", "TSV", own=False) == b"1\n"
        assert engine.begun == READ_THREADS
        await client.close()


@pytest.mark.parametrize("query_id", ["a\r\nSet-Cookie: b=c", "a\nb", "a b", "é", "x" * 201, "\x00"])
async def test_a_query_id_that_cannot_be_a_header_is_refused(engine: Watched, query_id: str) -> None:
    async with serving(engine, "") as url, aiohttp.ClientSession() as session:
        async with session.get(url, params={"query": "SELECT 1", "query_id": query_id}) as answer:
            assert answer.status == 400 and "query_id" in await answer.text() and "Set-Cookie" not in answer.headers
        async with session.get(url, params={"query": "SELECT 1", "query_id": "my-query:1"}) as answer:
            assert answer.headers["X-ClickHouse-Query-Id"] == "my-query:1"
