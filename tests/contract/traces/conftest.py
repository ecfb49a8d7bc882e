"""Both engines with the schema, and a reader over the real read-only endpoint, without a collector."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web

from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    """One server for all tests that do not end it."""
    with ClickHouseServer(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(params=["chdb", pytest.param("server", marks=pytest.mark.full)])
def bare_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    """An engine without anything in it."""
    if request.param == "chdb":
        made: TraceStore = ChdbEngine(tmp_path_factory.mktemp("chdb") / "traces")
    else:
        server: ClickHouseServer = request.getfixturevalue("server")
        made = ServerEngine(ServerAddress.parse(server.url()))
        made.command("DROP DATABASE IF EXISTS otel SYNC")
    yield made
    made.close()


@pytest.fixture
def engine(bare_engine: TraceStore) -> TraceStore:
    """An engine with our schema."""
    create_schema(bare_engine, where="the test")
    return bare_engine


@pytest.fixture
async def reader(engine: TraceStore) -> AsyncIterator[TraceReader]:
    """A reader over HTTP, through the collector's endpoint."""
    endpoint = SqlEndpoint(engine)
    runner = web.AppRunner(endpoint.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with TraceReader(f"http://127.0.0.1:{runner.addresses[0][1]}") as made:
        yield made
    await runner.cleanup()
    endpoint.close()
