"""Latency of reading rollouts out of millions of spans, against OpenTelemetry's default table and Agent Lightning 0.3.

python -m bench.reads                          # 5,000,000 spans: some minutes to fill, then a minute of reading
python -m bench.reads --spans=500000           # smaller
python -m bench.reads --data=FOLDER            # keeps the filled store there for reuse
python -m bench.reads --server                 # in a ClickHouse server instead of chdb in the collector

Ours is read through Store and its reader, the default table through the same connection. No rollout is read twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from agl_otel.settings import PORTS, Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.store import LightningStore
from agl_otel.types import Attempt, AttemptLedger, ProcessRecord, Rollout
from agl_otel_hook import conventions
from bench import peers
from bench.harness import Contest, Turn, report, report_absent, report_against_bar, run_bench, take_turns
from bench.load import Address, drive
from bench.otlp import SPANS_PER_ATTEMPT, requests
from bench.read_data import SPANS_PER_ROLLOUT, fill
from tests.clickhouse_server import ClickHouseServer
from tests.environments import AbsentError

BATCH: Final = 256
SINGLE: Final = 200
REQUESTS: Final = 8
BAR_MS: Final = 40.0
STOCK_SQL: Final = (Path(__file__).parent / "read_query.sql").read_text()
_SAMPLE: Final = """SELECT RolloutId FROM (
  SELECT RolloutId FROM otel.rollout_summary_states GROUP BY RolloutId ORDER BY RolloutId LIMIT {{filled:UInt64}}
) ORDER BY {order} LIMIT {{limit:UInt64}} OFFSET {{offset:UInt64}}"""
_MARKERS: Final = """SELECT RolloutId, AttemptId, SpanAttributes[{process:String}] AS Process, countIf(SpanName != {seal:String}) AS Spans
FROM otel.otel_traces WHERE RolloutId IN {rollouts:Array(String)} AND Process != '' GROUP BY ALL"""
Read = Callable[[Sequence[str]], Awaitable[int]]
"""Reads rollouts; returns the number of their spans."""


class Batches:
    """Batches of 256 rollouts, each read once, with the attempts that the queue would have."""

    def __init__(self, ids: Sequence[str], attempts: dict[str, Attempt]) -> None:
        self._batches = iter([ids[start : start + BATCH] for start in range(0, len(ids), BATCH)])
        self.attempts = attempts

    @classmethod
    async def sample(cls, store: LightningStore, filled: int, count: int, order: str, offset: int = 0) -> Batches:
        """Select `count` batches out of the first `filled` rollouts, in an order of their ids."""
        given = {"filled": filled, "limit": count * BATCH, "offset": offset}
        rows = await store.reader.query(_SAMPLE.format(order=order), params=given)
        ids = [row["RolloutId"] for row in rows]
        attempts: dict[str, Attempt] = {}
        for start in range(0, len(ids), BATCH):
            given = {"rollouts": ids[start : start + BATCH], "process": conventions.PROCESS, "seal": conventions.SPAN_SEAL}
            for row in await store.reader.query(_MARKERS, params=given):
                key = {"rollout_id": row["RolloutId"], "attempt_id": row["AttemptId"]}
                attempt = attempts.setdefault(row["RolloutId"], Attempt(**key, sequence_id=1, start_time=0.0, seals={}))
                marker, spans = str(row["Process"]), int(row["Spans"])
                if marker.startswith("proxy"):
                    update: dict[str, Any] = {"seals": {marker: spans}}
                else:
                    record = ProcessRecord(pid=7, command="python agent.py", marker=marker, begun=spans, ended=spans, closed=True)
                    update = {"ledger": AttemptLedger(reach="hooked", processes=[record], over=0.0)}
                attempts[row["RolloutId"]] = attempt.model_copy(update=update)
        return cls(ids, attempts)

    def turn(self, read: Read, expected: int) -> Turn:
        """Make a turn that measures the milliseconds of the next batch."""

        async def turn() -> float:
            ids = next(self._batches)
            start = time.perf_counter()
            spans = await read(ids)
            taken = (time.perf_counter() - start) * 1000
            if spans != expected:
                raise RuntimeError(f"{spans} spans were read, and {expected} are stored")
            return taken

        return turn


def observed(store: LightningStore, batches: Batches) -> Read:
    """Read by our reader: barrier, deduplicated spans, calls with their tokens, rewards, a verdict for each attempt."""

    async def read(ids: Sequence[str]) -> int:
        rollouts = [Rollout(rollout_id=each, input=None, start_time=0.0) for each in ids]
        traces = await store.reader.traces(rollouts, [batches.attempts[each] for each in ids])
        if {verdict.kind for verdict in traces.verdicts.values()} != {"complete"}:
            raise RuntimeError(f"not every attempt is complete: {next(iter(traces.verdicts.values()))}")
        return traces.spans

    return read


def of_stock_table(store: LightningStore) -> Read:
    """Read from OpenTelemetry's default table."""

    async def read(ids: Sequence[str]) -> int:
        table: pa.Table = await store.reader.arrow(STOCK_SQL, params={"rollouts": list(ids)})
        return int(table.num_rows)

    return read


async def against_the_stock_table(store: LightningStore, options: argparse.Namespace) -> None:
    """Compare 256 random rollouts, and 256 adjacent ones as one training step enqueues them."""
    count = 2 * (options.rounds + 1)
    rollouts = options.spans // SPANS_PER_ROLLOUT
    orders = {"at random": (f"cityHash64(RolloutId, {random.randrange(1 << 30)})", 0), "of one step": ("RolloutId", rollouts // 3)}
    counted = (SPANS_PER_ROLLOUT - 2) * BATCH  # the reader counts neither the attempt span nor the seal
    for name, (order, offset) in orders.items():
        batches = await Batches.sample(store, rollouts, count, order, offset)
        turns = batches.turn(observed(store, batches), counted), batches.turn(of_stock_table(store), SPANS_PER_ROLLOUT * BATCH)
        contest = await take_turns(*turns, rounds=options.rounds)
        metric = f"{BATCH} rollouts {name} out of {options.spans} spans, with verdicts"
        swapped = Contest(contest.baseline, contest.ours)  # so that the ratio is the speed-up
        against = "the same rows out of OpenTelemetry's default table"
        report("reads", metric, "ms (value: theirs, baseline: ours)", swapped, against=against, bar=4.0)
        report_against_bar("reads", metric, sorted(contest.ours)[len(contest.ours) // 2], "ms", BAR_MS)


async def of_one(store: LightningStore, options: argparse.Namespace) -> None:
    """Measure reading the spans of one rollout."""
    given = {"filled": options.spans // SPANS_PER_ROLLOUT, "limit": SINGLE, "offset": 0}
    rows = await store.reader.query(_SAMPLE.format(order="cityHash64(RolloutId, 11)"), params=given)
    waits: list[float] = []
    for row in rows:
        start = time.perf_counter()
        spans = await store.reader.spans([row["RolloutId"]])
        waits.append((time.perf_counter() - start) * 1000)
        assert len(spans) == SPANS_PER_ROLLOUT, row
    waits.sort()
    more = {"p99_ms": round(waits[int(0.99 * len(waits))], 3), "rollouts": len(waits)}
    report_against_bar("reads", f"spans of one rollout out of {options.spans}, p50", waits[len(waits) // 2], "ms", BAR_MS, **more)


async def against_agentlightning(store: LightningStore, folder: Path, options: argparse.Namespace) -> None:
    """Compare `store.traces` of 256 rollouts with 256 calls of query_spans, in sequence and concurrently."""
    spans = BATCH * SPANS_PER_ATTEMPT * 2
    await store.enqueue([{}] * BATCH)
    claimed = await store.dequeue_many_rollouts(limit=BATCH, worker_id="bench")
    ids = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
    assert store.description.collector_http is not None
    await _send(Address(f"{store.description.collector_http}/v1/traces"), ids)

    async def ours() -> float:
        start = time.perf_counter()
        traces = await store.traces([rollout for rollout, _ in ids])
        assert traces.spans == spans, traces.spans
        return (time.perf_counter() - start) * 1000

    for concurrent in (False, True):
        metric = f"traces of {BATCH} rollouts, {spans} spans, beside {options.spans} others"
        try:
            async with peers.agentlightning(folder, BATCH) as peer:
                await _send(peer.address, peer.ids[:BATCH])
                async with _reading(peer, concurrent=concurrent) as theirs:
                    contest = await take_turns(ours, theirs, rounds=options.rounds)
                how = "all at once" if concurrent else "one after the other"
                swapped = Contest(contest.baseline, contest.ours)
                against = f"{BATCH} query_spans of Agent Lightning 0.3 (in memory), {how}"
                report("reads", metric, "ms (value: theirs, baseline: ours)", swapped, against=against, bar=8.0)
        except AbsentError as reason:
            report_absent("reads", metric, "ms", str(reason))


async def _send(address: Address, ids: peers.Ids) -> None:
    """Send the spans of two attempts for each rollout."""
    size = BATCH * SPANS_PER_ATTEMPT * 2 // REQUESTS
    bodies = requests(size, templates=REQUESTS, ids=ids)
    await asyncio.to_thread(drive, address, bodies, seconds=3600, clients=1, limit=REQUESTS)


@contextlib.asynccontextmanager
async def _reading(peer: peers.Peer, *, concurrent: bool) -> AsyncGenerator[Turn]:
    """Run peer_reads.py with 0.3's own client; its turns return milliseconds as that process measures them."""
    url = peer.address.http.removesuffix("/v1/traces")
    command = [peers.agentlightning_python(), str(Path(__file__).parent / "peer_reads.py"), url, str(int(concurrent))]
    child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    source, sink = child.stdout, child.stdin

    async def turn() -> float:
        sink.write(" ".join(rollout for rollout, _ in peer.ids[:BATCH]).encode() + b"\n")
        seconds, spans = (await source.readline()).split()
        assert int(spans) == BATCH * SPANS_PER_ATTEMPT * 2, spans
        return float(seconds) * 1000

    try:
        yield turn
    finally:
        sink.close()
        await child.wait()


async def main(options: argparse.Namespace) -> None:
    """Fill the store, start the stack, measure."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as made, contextlib.ExitStack() as until_end:
        folder = Path(options.data or made)
        url = until_end.enter_context(ClickHouseServer(folder / "server")).url() if options.server else ""
        await asyncio.to_thread(fill, folder, options.spans, clickhouse_url=url)
        settings = Settings.load(data_dir=folder, clickhouse_url=url, store="", **dict.fromkeys(PORTS, 0))
        async with Stack(settings, only=("queue", "collector")) as stack, LightningStore(stack.address) as store:
            await against_the_stock_table(store, options)
            await of_one(store, options)
            await against_agentlightning(store, Path(made), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=5_000_000, help="stored spans")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--server", action="store_true", help="store the spans in a ClickHouse server")
    parser.add_argument("--data", default="", help="data directory to keep and reuse; default: a temporary one")
    run_bench(main(parser.parse_args()))
