"""Idle and slow HTTP connections are closed; clients that wait for an answer keep theirs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from aiohttp import web

import agl_otel
from agl_otel.net.http_server import LOOK_SECONDS, listen, make_runner, while_connected

SHORT_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(handler: object) -> AsyncGenerator[int]:
    """The port of a server with one handler, where a connection may be idle for SHORT_SECONDS."""
    app = web.Application()
    app.router.add_post("/", handler)  # pyright: ignore[reportArgumentType] a handler
    runner = make_runner(app, idle_seconds=SHORT_SECONDS, lingering_time=SHORT_SECONDS)
    await runner.setup()
    try:
        yield await listen(runner, "127.0.0.1", 0, None)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes = b"") -> bytes:
    """Send `drip` repeatedly until the server closes; return its answer."""

    async def drips() -> None:
        with contextlib.suppress(OSError):
            while drip:
                writer.write(drip)
                await writer.drain()
                await asyncio.sleep(SHORT_SECONDS / 10)

    dripping = asyncio.create_task(drips())
    try:
        parts: list[bytes] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):  # so it ends for who still sends
                while part := await reader.read(1 << 16):
                    parts.append(part)
        return b"".join(parts)
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@pytest.mark.parametrize(
    ("first", "drip"),
    [(b"", b""), (b"POST / HT", b""), (b"POST / HTTP/1.1\r\nX-Slow: ", b"a")],
    ids=["nothing", "half a line", "a byte now and then"],
)
async def test_an_incomplete_head_closes_the_connection(first: bytes, drip: bytes) -> None:
    async with serving(echo) as port, connection(port) as (reader, writer):
        writer.write(first)
        assert await until_closed(reader, writer, drip) == b""


async def test_a_connection_idle_after_an_answer_is_closed() -> None:
    async with serving(echo) as port, connection(port) as (reader, writer):
        writer.write(HEAD % 2 + b"hi")
        answer = await until_closed(reader, writer)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hi")


async def test_a_client_waiting_for_an_answer_is_not_idle() -> None:
    others_went = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await others_went.wait()
        return await echo(request)

    async with serving(slow) as port, connection(port) as (reader, writer):
        writer.write(HEAD % 2 + b"hi")
        async with connection(port) as (idle, idle_writer):
            await until_closed(idle, idle_writer)
        others_went.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_stop_does_not_wait_for_the_rest_of_a_body() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def read(request: web.Request) -> web.Response:
        await request.content.readexactly(2)
        began.set()
        try:
            return await echo(request)
        finally:
            ended.set()

    async with contextlib.AsyncExitStack() as clients, asyncio.timeout(PATIENCE_SECONDS / 2):  # less than aiohttp waits for a handler
        async with serving(read) as port:
            reader, writer = await clients.enter_async_context(connection(port))
            writer.write(HEAD % 4 + b"ha")
            await began.wait()
        assert ended.is_set()
        assert await until_closed(reader, writer) == b""


async def test_a_stop_waits_for_the_answer_to_a_request_that_has_arrived() -> None:
    began = asyncio.Semaphore(0)
    stopping = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        began.release()
        await stopping.wait()
        return await echo(request)

    async def until_one_is_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await until_closed(reader, writer) == b""
        stopping.set()

    async with contextlib.AsyncExitStack() as clients, asyncio.timeout(PATIENCE_SECONDS):
        async with serving(slow) as port:
            whole, part = [await clients.enter_async_context(connection(port)) for _ in range(2)]
            whole[1].write(HEAD % 2 + b"hi")
            part[1].write(HEAD % 2 + b"h")
            await began.acquire()
            await began.acquire()
            closed = asyncio.create_task(until_one_is_closed(*part))
        assert (await until_closed(*whole)).endswith(b"\r\n\r\nhi")
        await closed


async def test_a_request_without_a_target_is_answered() -> None:
    async with serving(echo) as port, connection(port) as (reader, writer):
        writer.write(b"CONNECT \r\n\r\n")
        assert b" 404 " in await until_closed(reader, writer)


@pytest.mark.parametrize("room", ["collector", "proxy", "web"])
def test_every_http_service_has_these_limits(room: str) -> None:
    files = list((Path(agl_otel.__file__).parent / room).resolve().rglob("*.py"))
    assert any("make_runner(" in path.read_text() for path in files)
    assert not [path.name for path in files if re.search(r"web\.(AppRunner|run_app)\(", path.read_text())]


@pytest.mark.parametrize("room", ["algorithms", "collector", "proxy", "web"])
def test_every_body_is_counted(room: str) -> None:
    files = (Path(agl_otel.__file__).parent / room).resolve().rglob("*.py")
    assert not [path.name for path in files if re.search(r"request\.(read|json|post|text|multipart|content)\b[^_]", path.read_text())]


async def test_work_is_cancelled_when_its_client_disconnects() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> web.Response:
        began.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async def handler(request: web.Request) -> web.Response:
        return await while_connected(request, endless())

    async with serving(handler) as port, asyncio.timeout(PATIENCE_SECONDS):
        async with connection(port) as (_, writer):
            writer.write(HEAD % 0)
            await began.wait()
            assert not ended.is_set()
        await ended.wait()


async def test_work_of_a_client_that_stays_is_answered() -> None:
    async def handler(request: web.Request) -> web.Response:
        return await while_connected(request, asyncio.sleep(2 * LOOK_SECONDS, web.Response(text="done")))

    async with serving(handler) as port, connection(port) as (reader, writer), asyncio.timeout(PATIENCE_SECONDS):
        writer.write(HEAD % 0)
        assert b"200 OK" in await reader.readline()
