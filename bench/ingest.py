"""How fast spans are acked on disk, and what a stored one costs, against a server that only parses each request and forgets it.

python bench/ingest.py                                               # the floor: the same HTTP server, acking from memory
python bench/ingest.py --baseline-url http://127.0.0.1:4747/v1/traces --baseline-pid PID   # any other OTLP/HTTP endpoint, say 0.3's store
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.settings import Settings
from bench.harness import Turn, cpu_seconds, free_port, process, report, take_turns
from bench.otlp import requests

HEADERS = {"Content-Type": "application/x-protobuf"}


async def send(url: str, bodies: Iterator[bytes], *, count: int, clients: int) -> float:
    """Send `count` requests by `clients` concurrent clients; answers the seconds until the last was acked."""
    numbers = iter(range(count))
    async with aiohttp.ClientSession() as session:

        async def client() -> None:
            for _ in numbers:
                async with session.post(url, data=next(bodies), headers=HEADERS) as response:
                    assert response.status == 200, await response.text()

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - start


async def drained(barrier_url: str) -> None:
    """Wait until all that was acked is stored, so that its CPU time is counted."""
    async with aiohttp.ClientSession() as session, session.post(barrier_url) as response:
        assert response.status == 200, await response.text()


def rate(url: str, barrier_url: str, bodies: Iterator[bytes], *, spans: int, count: int, clients: int) -> Turn:
    """Spans acked a second."""

    async def turn() -> float:
        seconds = await send(url, bodies, count=count, clients=clients)
        if barrier_url:
            await drained(barrier_url)
        return count * spans / seconds

    return turn


def cost(url: str, barrier_url: str, pid: int, bodies: Iterator[bytes], *, spans: int, count: int, clients: int) -> Turn:
    """Microseconds of the server's CPU for each span, until it is stored."""

    async def turn() -> float:
        before = cpu_seconds(pid)
        await send(url, bodies, count=count, clients=clients)
        if barrier_url:
            await drained(barrier_url)
        return (cpu_seconds(pid) - before) / (count * spans) * 1e6

    return turn


async def floor(port: int) -> None:
    """The baseline: parse, count, forget."""

    async def export(request: web.Request) -> web.Response:
        parsed = ExportTraceServiceRequest.FromString(await request.read())
        assert sum(len(s.spans) for r in parsed.resource_spans for s in r.scope_spans)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", export)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def main(arguments: argparse.Namespace) -> None:
    """Run every size against the baseline."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port"), 0)
        settings = Settings.load(data_dir=directory, **ports).with_ports()
        environment = {**os.environ, **settings.environment()}
        await stack.enter_async_context(process([sys.executable, "-m", "agl_otel.queue"], environment, settings.queue_port))
        pid = await stack.enter_async_context(process([sys.executable, "-m", "agl_otel.collector"], environment, settings.clickhouse_port))
        ours = f"http://127.0.0.1:{settings.otlp_http_port}"
        url, base_pid, against = arguments.baseline_url, arguments.baseline_pid, arguments.baseline_url
        if not url:
            port = free_port()
            command = [sys.executable, "-m", "bench.ingest", "--floor", str(port)]
            base_pid = await stack.enter_async_context(process(command, dict(os.environ), port))
            url, against = f"http://127.0.0.1:{port}/v1/traces", "an aiohttp server that parses and forgets"
        for spans, count, tokens in ((510, arguments.requests, 0), (6, arguments.requests * 10, 0), (60, arguments.requests, 800)):
            bodies = requests(spans, token_ids=tokens)
            load = {"spans": spans, "count": count, "clients": arguments.clients}
            name = f"{spans} spans a request" + (f", {tokens} token ids a call" if tokens else "")
            mine, theirs = (
                rate(f"{ours}/v1/traces", f"{ours}/barrier", bodies, **load),
                rate(url, arguments.baseline_barrier, bodies, **load),
            )
            report("ingest", f"acked, {name}", "spans/s", await take_turns(mine, theirs, rounds=arguments.rounds), against=against)
            if base_pid:
                mine = cost(f"{ours}/v1/traces", f"{ours}/barrier", pid, bodies, **load)
                theirs = cost(url, arguments.baseline_barrier, base_pid, bodies, **load)
                contest = await take_turns(mine, theirs, rounds=arguments.rounds)
                report("ingest", f"CPU until stored, {name}", "us/span", contest, against=against)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline-url", default="", help="an OTLP/HTTP traces endpoint")
    parser.add_argument("--baseline-barrier", default="", help="what to POST to until all is stored: another version of this collector")
    parser.add_argument("--baseline-pid", type=int, default=0, help="its process, for the CPU time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="requests a turn (ten times as many of the small ones)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--floor", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(floor(given.floor) if given.floor else main(given))
