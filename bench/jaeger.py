"""Jaeger's APIs at size: traces by id, and searches, over gRPC and HTTP, at 5,000,000 spans.

python -m bench.jaeger                        # fills a store first: some minutes
python -m bench.jaeger --data=FOLDER          # keeps the filled store there (the one of bench.dashboard), and uses it again
python -m bench.jaeger --rollouts=10000 --spans=500000

The data is bench.dashboard's. Every figure is what a client waits, each time for a trace that nobody has asked for yet; `worst_ms` is the
worst of them. "At first" is asked of a stack that has just started: ClickHouse loads what it keeps of a part when the part is first read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import aiohttp
import grpc.aio
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from agl_otel.settings import Settings, free_port
from agl_otel.traces.opened import open_store
from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.service import READER
from agl_otel_hook import conventions
from bench.dashboard import known_rollouts
from bench.harness import report_against_bar
from bench.read_data import fill

BARS_MS: Final = {"trace": 50.0, "search": 500.0}
SERVICE: Final = "agent"
WARMING: Final = 100  # traces that are asked for before the others: most parts are open then
_TRACES: Final = """SELECT TraceId, any(RolloutId), toUnixTimestamp64Nano(min(Timestamp)) FROM otel.otel_traces
WHERE cityHash64(RolloutId) % 100 = 1 GROUP BY TraceId LIMIT 600"""


class Known(NamedTuple):
    """A trace that is stored."""

    trace_id: str
    rollout_id: str
    start_nano: int


Ask = Callable[[Known], Awaitable[int]]
"""Asks, and answers how many spans (or traces) came."""


def traces_of(folder: Path) -> list[Known]:
    """Some of what is stored, in an order of its own."""
    engine = open_store(Settings.load(data_dir=folder, clickhouse_url="").clickhouse_db)
    try:
        found = [Known(str(row[0]), str(row[1]), int(str(row[2]))) for row in engine.select(_TRACES, {})]
    finally:
        engine.close()
    random.Random(3).shuffle(found)
    return found


@asynccontextmanager
async def stack(folder: Path) -> AsyncGenerator[tuple[str, str]]:
    """`agl-otel store` on the folder: (its URL, Jaeger's host:port)."""
    jaeger = free_port()
    program = str(Path(sys.executable).with_name("agl-otel"))
    command = [program, "store", "--port", "0", "--queue-port", "0", "--data-dir", str(folder), "--json"]
    environment = {**os.environ, "AGL_JAEGER_PORT": str(jaeger)}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield json.loads(await asyncio.wait_for(process.stdout.readline(), 180))["url"], f"127.0.0.1:{jaeger}"
    finally:
        process.terminate()
        await process.wait()


def asks(session: aiohttp.ClientSession, url: str, channel: grpc.aio.Channel) -> dict[str, tuple[str, Ask]]:
    """{what is asked: (its bar, how)}."""

    async def stream(method: str, request: Any) -> int:
        call = channel.unary_stream(
            f"/{READER}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=TracesData.FromString,
        )(request)
        return sum([len(scope.spans) async for data in call for group in data.resource_spans for scope in group.scope_spans])

    async def get(path: str) -> int:
        async with session.get(url + path) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        return len(found["data"] if "data" in found else found["result"]["resourceSpans"])

    def find(known: Known, **more: Any) -> pb.FindTracesRequest:
        asked = pb.TraceQueryParameters(service_name=SERVICE, search_depth=20)
        if more.pop("hour", False):
            asked.start_time_min.FromNanoseconds(known.start_nano)
            asked.start_time_max.FromNanoseconds(known.start_nano + 3600 * 10**9)
        for name, value in more.pop("tags", {}).items():
            asked.attributes.append(pb.KeyValue(key=name, value=pb.AnyValue(string_value=value)))
        for name, value in more.items():
            setattr(asked, name, value)
        return pb.FindTracesRequest(query=asked)

    def by_id(known: Known) -> Awaitable[int]:
        return stream("GetTraces", pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=bytes.fromhex(known.trace_id))]))

    def micro(known: Known) -> str:
        return f"&start={known.start_nano // 1000}&end={known.start_nano // 1000 + 3600 * 10**6}"

    tag = conventions.ROLLOUT_ID
    return {
        "trace by id, gRPC": ("trace", by_id),
        "trace by id, /api": ("trace", lambda known: get(f"/api/traces/{known.trace_id}")),
        "trace by id, /api/v3": ("trace", lambda known: get(f"/api/v3/traces/{known.trace_id}")),
        "search by service, gRPC": ("search", lambda known: stream("FindTraces", find(known))),
        "search by service in an hour, gRPC": ("search", lambda known: stream("FindTraces", find(known, hour=True))),
        "search by service, /api": ("search", lambda known: get(f"/api/traces?service={SERVICE}&limit=20")),
        "search by service in an hour, /api": ("search", lambda known: get(f"/api/traces?service={SERVICE}&limit=20{micro(known)}")),
        "search by operation, gRPC": ("search", lambda known: stream("FindTraces", find(known, operation_name="execute_tool"))),
        "search by rollout, gRPC": ("search", lambda known: stream("FindTraces", find(known, tags={tag: known.rollout_id}))),
        "search by a tag, gRPC": ("search", lambda known: stream("FindTraces", find(known, hour=True, tags={"error": "true"}))),
        "services, /api": ("trace", lambda _: get("/api/services")),
        "operations, /api": ("trace", lambda _: get(f"/api/services/{quote(SERVICE)}/operations")),
    }


async def measure(folder: Path, options: argparse.Namespace) -> None:
    """Start the stack and ask."""
    known = iter(await asyncio.to_thread(traces_of, folder))
    more = {"rollouts": options.rollouts, "spans": options.spans}
    async with stack(folder) as (url, jaeger), aiohttp.ClientSession() as session, grpc.aio.insecure_channel(jaeger) as channel:
        every = asks(session, url, channel)
        by_id = every["trace by id, gRPC"]

        async def look(metric: str, bar: str, ask: Ask) -> None:
            waits: list[float] = []
            for each in islice(known, options.rounds + 1):
                start = time.perf_counter()
                found = await ask(each)
                waits.append((time.perf_counter() - start) * 1000)
                assert found, f"{metric} found nothing for {each}"
            waits = sorted(waits[1:])  # the first one connects
            report_against_bar("jaeger", metric, waits[len(waits) // 2], "ms", BARS_MS[bar], worst_ms=round(waits[-1], 1), **more)

        await look("trace by id, gRPC, at first", *by_id)
        for each in islice(known, WARMING):
            await by_id[1](each)
        for metric, (bar, ask) in every.items():
            if not options.only or options.only in metric:
                await look(metric, bar, ask)


async def main(options: argparse.Namespace) -> None:
    """Fill, then ask."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as made:
        folder = Path(options.data or made)
        await asyncio.to_thread(fill, folder, options.spans, beside=False)
        await known_rollouts(folder, options.rollouts)
        await measure(folder, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000, help="how many the queue knows")
    parser.add_argument("--spans", type=int, default=5_000_000, help="how many spans are stored")
    parser.add_argument("--rounds", type=int, default=10, help="times that everything is asked")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--data", default="", help="a folder for the stack's data, kept and used again; a temporary one where empty")
    asyncio.run(main(parser.parse_args()))
