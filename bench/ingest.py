"""Rate of ingest up to the last visible row: our collector against Agent Lightning 0.3's store, rotel and our OpenTelemetry Collector.

python -m bench.ingest                  # a few minutes: three short turns of each
python -m bench.ingest --seconds=60     # for the bars: a minute of load for each contender
python -m bench.ingest --only=510       # only contests with this text in their name

Rates should exceed their bars as a ratio; ratios of CPU, latency and memory should be below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import aiohttp

from bench import peers
from bench.harness import Turn, cpu_seconds, report, report_absent, report_against_bar, resident_bytes, run_bench, take_turns
from bench.load import Address, drive
from bench.otlp import requests
from bench.peers import Peer
from tests.environments import AbsentError

Made = Callable[[Path], contextlib.AbstractAsyncContextManager[Peer]]
IDLE_PROBES: Final = 20
IDLE_SECONDS: Final = 2.0  # before each probe: probes without pauses would be batched like a load
PROBE_SECONDS: Final = 0.5


class Shape(NamedTuple):
    """Shape of the requests."""

    name: str
    spans: int
    clients: int
    tokens: int = 0
    grpc: bool = False

    def bodies(self, ids: peers.Ids) -> Iterator[bytes]:
        """Generate requests without end."""
        return requests(self.spans, token_ids=self.tokens, ids=ids)


BIG: Final = Shape("510 spans a request", 510, 4)
CONTESTS: Final[tuple[tuple[Shape, Made, float], ...]] = (
    (BIG, peers.agentlightning, 10.0),
    (BIG, peers.rotel, 1.2),
    (BIG, peers.otelcol, 3.0),
    (Shape("6 spans a request, HTTP", 6, 16), peers.agentlightning, 8.0),
    (Shape("6 spans a request, gRPC (theirs: HTTP)", 6, 16, grpc=True), peers.agentlightning, 4.0),
    (Shape("800+200 token ids a model call", 60, 4, tokens=800), peers.agentlightning, 8.0),
)
"""(shape, peer, bar: the ratio of our spans a second to the peer's)."""


class Feed:
    """Sends one shape to one peer, and counts its spans."""

    def __init__(self, peer: Peer, shape: Shape) -> None:
        self.peer = peer
        self._shape = shape
        self._bodies = shape.bodies(peer.ids)
        self._address = Address(grpc=peer.grpc) if shape.grpc and peer.grpc else peer.address
        self._total = 0

    def turn(self, seconds: float) -> Turn:
        """Make a turn that measures spans a second from the first request to the last visible row."""

        async def turn() -> float:
            start = time.perf_counter()
            sent = await asyncio.to_thread(drive, self._address, self._bodies, seconds=seconds, clients=self._shape.clients)
            spans = sent.requests * self._shape.spans
            self._total += spans
            await self.peer.visible(self._total)
            return spans / (time.perf_counter() - start)

        return turn

    async def cost(self, seconds: float) -> float:
        """Return the CPU microseconds per span of all the peer's processes, until the spans are visible."""
        before, had = sum(map(cpu_seconds, self.peer.pids)), self._total
        await self.turn(seconds)()
        return (sum(map(cpu_seconds, self.peer.pids)) - before) / (self._total - had) * 1e6


async def contests(folder: Path, options: argparse.Namespace) -> None:
    """Compare each shape with its peers."""
    turn_seconds = options.seconds / options.rounds
    for number, (shape, made, bar) in enumerate(CONTESTS):
        metric = f"visible, {shape.name}"
        if options.only not in metric:
            continue
        place = folder / str(number)
        place.mkdir()
        try:
            async with peers.ours(place) as mine, made(place) as theirs:
                feeds = Feed(mine, shape), Feed(theirs, shape)
                contest = await take_turns(*(feed.turn(turn_seconds) for feed in feeds), rounds=options.rounds)
                costs = [round(await feed.cost(turn_seconds), 1) for feed in feeds]
                more: dict[str, Any] = {"bar": bar, "cpu_us_a_span": costs[0], "baseline_cpu_us_a_span": costs[1]}
                report("ingest", metric, "spans/s", contest, against=theirs.name, **more)
        except AbsentError as reason:
            report_absent("ingest", metric, "spans/s", str(reason))


async def alone(folder: Path, options: argparse.Namespace) -> None:
    """Measure our collector against bars: CPU, latency and visibility at half of the top rate, memory."""
    async with peers.ours(folder) as mine:
        feed = Feed(mine, BIG)
        await feed.turn(options.seconds / options.rounds)()
        waits: list[float] = []
        for _ in range(IDLE_PROBES):
            await asyncio.sleep(IDLE_SECONDS)
            waits.append(await _probe(mine))
        report_against_bar("ingest", f"sent to visible, idle, slowest of {IDLE_PROBES}", max(waits) * 1000, "ms", 150)
        cost = await feed.cost(options.seconds)
        report_against_bar("ingest", f"CPU, collector and ClickHouse, {BIG.name}", cost, "us/span", 25)
        top = await feed.turn(options.seconds)()
        pace, bodies = top / 2 / BIG.spans, BIG.bodies(())
        async with _probing(mine) as seen:
            sent = await asyncio.to_thread(drive, mine.address, bodies, seconds=options.seconds, clients=8, requests_per_second=pace)
        report_against_bar("ingest", f"ack, p99, at {round(pace * BIG.spans)} spans/s", sent.wait(0.99) * 1000, "ms", 150)
        report_against_bar("ingest", f"sent to visible under that load, slowest of {len(seen)}", max(seen) * 1000, "ms", 1000)
        await _memory(mine, bodies, options.spans)


async def _memory(mine: Peer, bodies: Iterator[bytes], spans: int) -> None:
    """Measure the growth of resident memory from the first half of `spans` to the second."""
    steps: list[int] = []
    for _ in range(10):
        await asyncio.to_thread(drive, mine.address, bodies, seconds=3600, clients=BIG.clients, limit=spans // 10 // BIG.spans)
        await mine.visible(0)
        steps.append(resident_bytes(mine.pids[0]))
    more = {"mib_after_each_tenth": [step >> 20 for step in steps]}
    grown = max(steps[5:]) / max(steps[:5])
    report_against_bar("ingest", f"memory, second half of {spans} spans against the first", grown, "ratio", 1.1, **more)


@contextlib.asynccontextmanager
async def _probing(mine: Peer) -> AsyncGenerator[list[float]]:
    """Probe twice a second within the context; yield the list of seconds until the probes' spans were visible."""
    seen: list[float] = []

    async def probe() -> None:
        while True:
            seen.append(await _probe(mine))
            await asyncio.sleep(PROBE_SECONDS)

    task = asyncio.create_task(probe())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _probe(mine: Peer) -> float:
    """Return the seconds from sending the spans of one attempt until a query finds them."""
    rollout = f"ro-probe-{uuid4().hex}"
    body = next(requests(6, templates=1, ids=[(rollout, "at-probe")]))
    start = time.perf_counter()
    headers = {"Content-Type": "application/x-protobuf"}
    async with aiohttp.ClientSession() as session:
        async with session.post(mine.address.http, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        query = f"SELECT count() FROM otel.otel_traces WHERE RolloutId = '{rollout}' FORMAT TabSeparated"
        for _ in itertools.count():
            async with session.post(mine.clickhouse, data=query) as response:
                assert response.status == 200, await response.text()
                if int(await response.text()) == 6:
                    return time.perf_counter() - start
            await asyncio.sleep(0.005)
    raise AssertionError


async def main(options: argparse.Namespace) -> None:
    """Run the requested measurements."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        (alone_in := Path(folder) / "alone").mkdir()
        if not options.only:
            await alone(alone_in, options)
        await contests(Path(folder), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of load on each contender, over all turns")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--spans", type=int, default=100_000, help="spans over which memory is measured (for the bar: 5000000)")
    parser.add_argument("--only", default="", help="only contests with this text in their name")
    run_bench(main(parser.parse_args()))
