"""A long-lived reader finds a collector that restarted at another address."""

from __future__ import annotations

import pytest
from aiohttp import web

from agl_otel.errors import UnavailableError
from agl_otel.net.http_server import listen, make_runner
from agl_otel.settings import free_ports
from agl_otel.traces.reader import TraceReader
from agl_otel.types import Describe


def described(*collectors: str) -> Describe:
    return Describe(queue="127.0.0.1:1", clickhouse="http://127.0.0.1:1", collectors=list(collectors))


async def test_a_failed_barrier_is_retried_at_the_collectors_new_addresses() -> None:
    asked: list[str] = []

    async def barrier(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"position": 1})

    app = web.Application()
    app.router.add_post("/barrier", barrier)
    runner = make_runner(app)
    await runner.setup()
    here = f"http://127.0.0.1:{await listen(runner, '127.0.0.1', 0, None)}"
    (unused,) = free_ports(1)

    async def where() -> Describe:
        return described(here)

    try:
        async with TraceReader("http://127.0.0.1:1", collectors=[f"http://127.0.0.1:{unused}"], where=where) as reader:
            await reader.barrier()
            await reader.barrier()
            assert (asked, reader.collectors) == (["/barrier"] * 2, (here,))
    finally:
        await runner.cleanup()


async def test_a_collector_that_is_described_and_does_not_answer_stops_a_barrier() -> None:
    (unused,) = free_ports(1)

    async def where() -> Describe:
        return described(f"http://127.0.0.1:{unused}")

    async with TraceReader("http://127.0.0.1:1", collectors=[f"http://127.0.0.1:{unused}"], where=where) as reader:
        with pytest.raises(UnavailableError):
            await reader.barrier()
