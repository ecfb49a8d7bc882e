"""Latency of the dashboard in headless Chromium at 100,000 rollouts and 5,000,000 spans: first paint and interactions.

python -m bench.dashboard                        # fills a store first: some minutes
python -m bench.dashboard --data=FOLDER          # keeps the filled store there for reuse
python -m bench.dashboard --rollouts=10000 --spans=500000

The spans are those of bench.reads; the queue has the first `--rollouts` of their rollouts, as one run of 500 steps. The browser has no
cache; an interaction ends when its result is painted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from agl_otel.settings import Settings
from agl_otel.store import Store
from agl_otel.traces.opened import open_store
from bench.harness import report_absent, report_against_bar, run_bench, store_command
from bench.read_data import fill
from tests.environments import AbsentError, installed

PLAYWRIGHT: Final = ("playwright==1.65.2",)
BARS_MS: Final = {"paint": 1000.0, "interaction": 200.0}
RUN: Final = "bench"
STEPS: Final = 500
_ATTEMPTS: Final = """SELECT RolloutId, any(AttemptId), toUnixTimestamp(min(Timestamp))
FROM otel.otel_traces WHERE RolloutId IN (SELECT RolloutId FROM otel.otel_traces GROUP BY RolloutId ORDER BY RolloutId LIMIT {limit:UInt64})
GROUP BY RolloutId ORDER BY RolloutId"""
_COLUMNS: Final = (
    "ordinal, rollout_id, status, mode, start_time, end_time, resources_id, resources_version, attempt_count, latest_attempt_id, "
    "metadata, run, step"
)


async def known_rollouts(folder: Path, count: int) -> None:
    """Insert rows for `count` rollouts with stored spans into the database of a stopped queue."""
    database = folder / "queue.db"
    if database.exists():
        return
    async with Store.embedded(folder) as store:  # creates the schema
        await store.statistics()
    engine = open_store(Settings.load(data_dir=folder, clickhouse_url="").clickhouse_db)
    try:
        found = [(str(row[0]), str(row[1]), float(str(row[2]))) for row in engine.select(_ATTEMPTS, {"limit": count})]
    finally:
        engine.close()
    rollouts: list[tuple[Any, ...]] = []
    attempts: list[tuple[Any, ...]] = []
    for place, (rollout_id, attempt_id, start) in enumerate(found, 1):
        status, mode = "failed" if place % 40 == 0 else "succeeded", "val" if place % 10 == 0 else "train"
        step = place * STEPS // count
        metadata = json.dumps({"run": RUN, "step": step}, separators=(",", ":"))
        rollouts.append((place, rollout_id, status, mode, start, start + 4, None, None, 1, attempt_id, metadata, RUN, step))
        attempts.append((attempt_id, rollout_id, status, start, start + 4, f"worker-{place % 64}", "x", "{}"))
    with sqlite3.connect(database) as queue:
        queue.executemany(f"INSERT INTO rollouts ({_COLUMNS}) VALUES ({', '.join('?' * 13)})", rollouts)
        queue.executemany("INSERT INTO inputs (ordinal, input) VALUES (?, ?)", [(row[0], '{"question":"what is it?"}') for row in rollouts])
        queue.executemany(
            "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, start_time, end_time, worker_id, token, seals) "
            "VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?)",
            attempts,
        )
        counted = "'rollouts/' || status || '/' || mode, 0, count(*) FROM rollouts GROUP BY status, mode"
        queue.execute(f"INSERT OR REPLACE INTO tallies (name, shard, count) SELECT {counted}")
        queue.execute("INSERT OR REPLACE INTO tallies (name, shard, count) SELECT 'attempts', 0, count(*) FROM attempts")
        queue.execute(
            "INSERT INTO run_tallies (run, status, mode, shard, rollouts, attempts, first_start, last_end, last_step) "
            "SELECT run, status, mode, 0, count(*), sum(attempt_count), min(start_time), max(end_time), max(step) "
            "FROM rollouts GROUP BY run, status, mode"
        )
    queue.close()


async def measure(folder: Path, options: argparse.Namespace) -> None:
    """Start the stack, run dashboard_look.py, print its results."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise AbsentError("chromium is missing: apt-get install chromium")
    python = installed("playwright", PLAYWRIGHT) / "bin" / "python"
    async with store_command(folder) as (url, _):
        given = {"url": url, "chromium": chromium, "rounds": options.rounds, "run": RUN}
        look = await asyncio.create_subprocess_exec(
            str(python), str(Path(__file__).with_name("dashboard_look.py")), json.dumps(given), stdout=asyncio.subprocess.PIPE
        )
        assert look.stdout is not None
        async for line in look.stdout:
            found = json.loads(line)
            waits = sorted(found["ms"])
            more = {"worst_ms": round(waits[-1], 1), "rounds": len(waits), "rollouts": options.rollouts, "spans": options.spans}
            report_against_bar("dashboard", found["metric"], waits[len(waits) // 2], "ms", BARS_MS[found["kind"]], **more)
        await look.wait()


async def main(options: argparse.Namespace) -> None:
    """Fill the store, then measure."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as made:
        folder = Path(options.data or made)
        start = time.monotonic()
        await asyncio.to_thread(fill, folder, options.spans, beside=False)
        await known_rollouts(folder, options.rollouts)
        print(f"filled in {time.monotonic() - start:.0f} s", file=sys.stderr)
        try:
            await measure(folder, options)
        except AbsentError as reason:
            report_absent("dashboard", "first paint", "ms", str(reason))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000, help="rollouts in the queue")
    parser.add_argument("--spans", type=int, default=5_000_000, help="stored spans")
    parser.add_argument("--rounds", type=int, default=5, help="measured repetitions")
    parser.add_argument("--data", default="", help="data directory to keep and reuse; default: a temporary one")
    run_bench(main(parser.parse_args()))
