"""Effect of stalled viewers on the latency of ingest.

python -m bench.viewers                     # a minute
python -m bench.viewers --seconds=10 --rounds=5

A stack receives requests at a fixed rate, in turn with and without viewers that request a large response and do not read it: 100 MB by
SQL, a trace of 10,000 spans as JSON, and the same trace over Jaeger's gRPC. The figure is the 99th percentile of the time to the ack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import grpc.aio

from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.service import READER
from bench.harness import report, report_against_bar, run_bench, store_command, take_turns
from bench.load import Address, drive
from bench.otlp import request_of, requests

BAR: Final = 1.2
SPANS: Final = 10_000  # of the trace that viewers request
TRACE: Final = os.urandom(16).hex()
SQL: Final = "SELECT number, repeat('x', 1000) FROM numbers(100000)"  # 100 MB


async def fill(url: str) -> None:
    """Store one trace of SPANS spans."""
    values = {f"attribute.{number}": f"value of attribute {number}" for number in range(10)}
    spans = [{"name": "work", "trace_id": TRACE, "span_id": os.urandom(8).hex(), "attributes": values} for _ in range(SPANS)]
    headers = {"Content-Type": "application/x-protobuf", "agl-ack": "stored"}
    request = request_of(spans, {"service.name": "agent"})
    async with aiohttp.ClientSession() as session, session.post(url, data=request, headers=headers) as done:
        assert done.status == 200, await done.text()


async def hang_http(closers: contextlib.AsyncExitStack, url: str, method: str, path: str, body: str = "") -> None:
    """Send a request, and read only the status line of its response."""
    loop, where = asyncio.get_running_loop(), urlsplit(url)
    viewer = closers.enter_context(socket.socket())
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    viewer.setblocking(False)
    await loop.sock_connect(viewer, (where.hostname, where.port))
    await loop.sock_sendall(
        viewer, f"{method} {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    status = await loop.sock_recv(viewer, 12)
    assert status.endswith(b"200"), status


async def hang_grpc(closers: contextlib.AsyncExitStack, address: str) -> None:
    """Request the trace from Jaeger's port, and read only one message."""
    channel = await closers.enter_async_context(grpc.aio.insecure_channel(address))
    ask = channel.unary_stream(f"/{READER}/GetTraces", request_serializer=pb.GetTracesRequest.SerializeToString, response_deserializer=None)
    call = ask(pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=bytes.fromhex(TRACE))]))
    assert isinstance(await call.read(), bytes), "no such trace"
    closers.callback(call.cancel)


async def main(options: argparse.Namespace) -> None:
    """Fill the store, then take turns."""
    async with contextlib.AsyncExitStack() as closers:
        folder = Path(closers.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-")))
        url, jaeger = await closers.enter_async_context(store_command(folder))
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/agl/describe") as answer:
            described = await answer.json()
        collector, clickhouse = described["collectors"][0], described["clickhouse"]
        await fill(f"{collector}/v1/traces")
        bodies = requests(6)

        async def p99() -> float:
            address = Address(f"{collector}/v1/traces")
            sent = await asyncio.to_thread(
                drive, address, bodies, seconds=options.seconds, clients=8, requests_per_second=options.requests_per_second
            )
            return sent.wait(0.99) * 1000

        @contextlib.asynccontextmanager
        async def hanging() -> AsyncGenerator[None]:
            async with contextlib.AsyncExitStack() as viewers:
                for _ in range(options.viewers):
                    await hang_http(viewers, clickhouse, "POST", "/", SQL)
                    await hang_http(viewers, url, "GET", f"/api/traces/{TRACE}")
                    await hang_grpc(viewers, jaeger)
                yield

        async def beside_viewers() -> float:
            async with hanging():
                return await p99()

        contest = await take_turns(beside_viewers, p99, rounds=options.rounds)
        metric = "p99 of the ack beside stalled viewers"
        more = {"viewers": 3 * options.viewers, "requests_a_second": options.requests_per_second}
        report("viewers", metric, "ms", contest, against="the same without viewers", **more)
        report_against_bar("viewers", f"{metric} against that without", contest.ratio, "ratio", BAR, **more)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of one turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--viewers", type=int, default=2, help="viewers of each of the three kinds")
    parser.add_argument("--requests-per-second", type=float, default=200.0, help="requests of six spans each")
    run_bench(main(parser.parse_args()))
