"""Fill ClickHouse with millions of spans by INSERT … SELECT into our table, so that every view is filled as in production.

The same rows are stored in `otel.stock_traces`, the default table of OpenTelemetry's ClickHouse exporter.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Final

from agl_otel.settings import Settings
from agl_otel.traces.opened import TraceStore, open_store
from bench.peers import DEFAULT_TABLE

SPANS_PER_ROLLOUT: Final = 12
SPREAD_MS: Final = 3 * 86_400_000  # rollouts are spread over three days: four partitions
SLICE_SPANS: Final = 480_000
TEXT_CHARACTERS: Final = 160_000
SETTLE_SECONDS: Final = 300.0
_FOUND: Final = (
    "SELECT (SELECT count() FROM otel.otel_traces), (SELECT count() FROM otel.stock_traces), (SELECT min(BatchId) FROM otel.otel_traces)"
)
_HERE: Final = Path(__file__).parent
_WORDS: Final = ("the", "agent", "asks", "a", "model", "for", "its", "next", "query", "and", "reads", "what", "came", "back", "before")


def fill(data_dir: Path, spans: int, *, beside: bool = True, clickhouse_url: str = "") -> None:
    """Store `spans` spans in the data directory of a stopped stack, continuing after the last slice of an interrupted call.

    `beside` stores them in the default table, too. With `clickhouse_url` they are stored in that server instead.
    """
    store = open_store(Settings.load(data_dir=data_dir, clickhouse_url=clickhouse_url).clickhouse_db)
    try:
        store.command(DEFAULT_TABLE.replace("otel.otel_traces", "otel.stock_traces"))
        ours, stock, first_ms = (int(str(value)) for value in store.select(_FOUND)[0])
        start_ms, rollout_ms = first_ms or int(time.time() * 1000) - SPREAD_MS, SPREAD_MS * SPANS_PER_ROLLOUT / spans
        rollouts, step = spans // SPANS_PER_ROLLOUT, SLICE_SPANS // SPANS_PER_ROLLOUT
        for first in range(0, rollouts, step):
            last = min(first + step, rollouts)
            count = (last - first) * SPANS_PER_ROLLOUT
            given = {"first": first * SPANS_PER_ROLLOUT, "count": count, "start_ms": start_ms, "rollout_ms": rollout_ms, "text": _text()}
            times = {"first": start_ms + int(first * rollout_ms), "end": start_ms + int(last * rollout_ms)}
            if ours < last * SPANS_PER_ROLLOUT:
                store.command((_HERE / "read_fill.sql").read_text(), given)
            if beside and stock < last * SPANS_PER_ROLLOUT:
                store.command((_HERE / "read_stock.sql").read_text(), times)
            print(f"{last * SPANS_PER_ROLLOUT} of {spans} spans are stored", file=sys.stderr)
        _settle(store)
    finally:
        store.close()


def _settle(store: TraceStore) -> None:
    """Wait until no merge runs, because it would take CPU from the reads."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while int(str(store.select("SELECT count() FROM system.merges")[0][0])) and time.monotonic() < deadline:
        time.sleep(0.5)
    (parts,) = store.select("SELECT count() FROM system.parts WHERE active AND table = 'otel_traces' AND database = 'otel'")[0]
    print(f"the spans are in {parts} parts", file=sys.stderr)


def _text() -> str:
    """Make the text that messages are sliced from: words and numbers, as compressible as real messages."""
    chance = random.Random(7)
    words = (chance.choice(_WORDS) if chance.random() > 0.15 else str(chance.randrange(10_000)) for _ in range(TEXT_CHARACTERS // 3))
    return " ".join(words)[:TEXT_CHARACTERS]
