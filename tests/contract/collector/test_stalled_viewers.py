"""Viewers that request much and read nothing lose their connection; other clients get their responses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Iterator

import aiohttp
import pytest
from aiohttp import web

from agl_otel.collector.sqlhttp import SLICE_BYTES, SqlEndpoint
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.http import ClickHouseHttp

ROWS = 4_000_000
LARGE = f"SELECT number FROM numbers({ROWS})"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them, and only Linux can")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path_factory.mktemp("stalled") / "traces")
    made.command("CREATE DATABASE otel")
    yield made
    made.close()


@contextlib.asynccontextmanager
async def serving(engine: ChdbEngine, stalled_seconds: float) -> AsyncGenerator[int]:
    """Serve a port that buffers no second response while the first is unread."""
    endpoint = SqlEndpoint(engine, held_bytes=1, stalled_seconds=stalled_seconds)
    runner = web.AppRunner(endpoint.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
        endpoint.close()


@contextlib.asynccontextmanager
async def hanging(port: int) -> AsyncGenerator[socket.socket]:
    """Connect a viewer that reads one byte of a large response, and then nothing more."""
    loop = asyncio.get_running_loop()
    with socket.socket() as viewer:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        viewer.setblocking(False)
        await loop.sock_connect(viewer, ("127.0.0.1", port))
        await loop.sock_sendall(viewer, f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(LARGE)}\r\n\r\n{LARGE}".encode())
        assert await loop.sock_recv(viewer, 1) == b"H"
        yield viewer


async def test_a_large_answer_comes_whole(engine: ChdbEngine) -> None:
    async with serving(engine, 60) as port, aiohttp.ClientSession() as session, session.post(f"http://127.0.0.1:{port}", data=LARGE) as got:
        body = await got.read()
        assert got.content_length == len(body) > 4 * SLICE_BYTES
    assert body == "".join(f"{number}\n" for number in range(ROWS)).encode()


async def test_a_viewer_that_reads_nothing_is_disconnected_and_others_are_answered(engine: ChdbEngine) -> None:
    async with serving(engine, 2) as port, hanging(port):
        client = ClickHouseHttp(f"http://127.0.0.1:{port}")
        assert await client.fetch("SELECT 1", "TSV") == b"1\n", "it waited until the answer was no longer held"
        await client.close()


async def test_a_response_is_released_when_its_viewer_disconnects(engine: ChdbEngine) -> None:
    async with serving(engine, 600) as port, hanging(port) as viewer:
        viewer.close()
        client = ClickHouseHttp(f"http://127.0.0.1:{port}")
        assert await client.fetch("SELECT 1", "TSV") == b"1\n"
        await client.close()
