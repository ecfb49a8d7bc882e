"""Latency of Jaeger's APIs at 5,000,000 spans: traces by id, and searches, over gRPC and HTTP.

python -m bench.jaeger                        # fills a store first: some minutes
python -m bench.jaeger --data=FOLDER          # keeps the filled store there for reuse; shared with bench.dashboard
python -m bench.jaeger --rollouts=10000 --spans=500000

Every request is for a trace that was not read before; `worst_ms` is the slowest. "At first" is measured right after the start of the
stack, because ClickHouse loads a part's marks on its first read.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import aiohttp
import grpc.aio
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from agl_otel.settings import Settings
from agl_otel.traces.opened import open_store
from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.service import READER
from agl_otel_hook import conventions
from bench.dashboard import known_rollouts
from bench.harness import report_against_bar, run_bench, store_command
from bench.read_data import fill

BARS_MS: Final = {"trace": 50.0, "search": 500.0}
SERVICE: Final = "agent"
WARMING: Final = 100  # unmeasured requests, after which most parts are open
_TRACES: Final = """SELECT TraceId, any(RolloutId), toUnixTimestamp64Nano(min(Timestamp)) FROM otel.otel_traces
WHERE cityHash64(RolloutId) % 100 = 1 GROUP BY TraceId LIMIT 600"""


class Known(NamedTuple):
    """A stored trace."""

    trace_id: str
    rollout_id: str
    start_nano: int


Ask = Callable[[Known], Awaitable[int]]
"""Sends a request; returns the number of spans or traces in the response."""


def traces_of(folder: Path) -> list[Known]:
    """Return some stored traces in random order."""
    engine = open_store(Settings.load(data_dir=folder, clickhouse_url="").clickhouse_db)
    try:
        found = [Known(str(row[0]), str(row[1]), int(str(row[2]))) for row in engine.select(_TRACES, {})]
    finally:
        engine.close()
    random.Random(3).shuffle(found)
    return found


def asks(session: aiohttp.ClientSession, url: str, channel: grpc.aio.Channel) -> dict[str, tuple[str, Ask]]:
    """Return {name of the request: (its bar, function that sends it)}."""

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
        query = pb.TraceQueryParameters(service_name=SERVICE, search_depth=20)
        if more.pop("hour", False):
            query.start_time_min.FromNanoseconds(known.start_nano)
            query.start_time_max.FromNanoseconds(known.start_nano + 3600 * 10**9)
        for name, value in more.pop("tags", {}).items():
            query.attributes.append(pb.KeyValue(key=name, value=pb.AnyValue(string_value=value)))
        for name, value in more.items():
            setattr(query, name, value)
        return pb.FindTracesRequest(query=query)

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
    """Start the stack, send the requests, print the results."""
    known = iter(await asyncio.to_thread(traces_of, folder))
    more = {"rollouts": options.rollouts, "spans": options.spans}
    async with store_command(folder) as (url, jaeger), aiohttp.ClientSession() as session, grpc.aio.insecure_channel(jaeger) as channel:
        every = asks(session, url, channel)
        by_id = every["trace by id, gRPC"]

        async def look(metric: str, bar: str, ask: Ask) -> None:
            waits: list[float] = []
            for each in islice(known, options.rounds + 1):
                start = time.perf_counter()
                found = await ask(each)
                waits.append((time.perf_counter() - start) * 1000)
                assert found, f"{metric} found nothing for {each}"
            waits = sorted(waits[1:])  # without the first one, which connects
            report_against_bar("jaeger", metric, waits[len(waits) // 2], "ms", BARS_MS[bar], worst_ms=round(waits[-1], 1), **more)

        await look("trace by id, gRPC, at first", *by_id)
        for each in islice(known, WARMING):
            await by_id[1](each)
        for metric, (bar, ask) in every.items():
            if not options.only or options.only in metric:
                await look(metric, bar, ask)


async def main(options: argparse.Namespace) -> None:
    """Fill the store, then measure."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as made:
        folder = Path(options.data or made)
        await asyncio.to_thread(fill, folder, options.spans, beside=False)
        await known_rollouts(folder, options.rollouts)
        await measure(folder, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000, help="rollouts in the queue")
    parser.add_argument("--spans", type=int, default=5_000_000, help="stored spans")
    parser.add_argument("--rounds", type=int, default=10, help="measured requests of each kind")
    parser.add_argument("--only", default="", help="only requests with this text in their name")
    parser.add_argument("--data", default="", help="data directory to keep and reuse; default: a temporary one")
    run_bench(main(parser.parse_args()))
