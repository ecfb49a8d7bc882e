"""A benchmark shape of Agent Lightning 0.3 on two cores: 32 runners claim a rollout, export four spans of 32 attributes, report success.

python -m bench.rollouts --agentlightning-python VENV/bin/python

At ours a span is acknowledged when it is on the disk, synced, and so are claim and report; 0.3 keeps all of it in memory. The runners are
one process (claimers.py), the same for both, so that its cost is in both figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from bench.claimers import ATTRIBUTES, SPANS, Job, claimers
from bench.harness import Turn, free_port, process, report, report_absent, services, take_turns

RUNNERS: Final = 32
METRIC: Final = f"{RUNNERS} runners: claim, {SPANS} spans of {ATTRIBUTES} attributes, report"


def turn_of(have: Callable[[Job], Awaitable[int]], kind: str, address: str, collector: str, rollouts: int) -> Turn:
    """Fill the queue, then run all of it; answers rollouts a second (the filling is not counted)."""

    async def turn() -> float:
        await have(Job(kind, address, "fill", rollouts))
        start = time.perf_counter()
        done = await have(Job(kind, address, "trace", rollouts, RUNNERS, collector=collector))
        return done / (time.perf_counter() - start)

    return turn


async def compare(options: argparse.Namespace) -> None:
    """Start both, let them take turns, print the result."""
    other = free_port()
    script = str(Path(options.agentlightning_python).parent / "agl")
    theirs = [script, "store", "--port", str(other), "--host", "127.0.0.1", "--log-level", "ERROR"]
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-"))
        made = await stack.enter_async_context(services(Path(folder), "queue", "collector"))
        await stack.enter_async_context(process(theirs, os.environ, other))
        have = await stack.enter_async_context(claimers())
        contest = await take_turns(
            turn_of(have, "ours", made.queue, f"{made.otlp}/v1/traces", options.rollouts),
            turn_of(have, "agentlightning", f"127.0.0.1:{other}", f"http://127.0.0.1:{other}/v1/traces", options.rollouts),
            rounds=options.rounds,
        )
    against = "agentlightning 0.3 (in memory)"
    report("rollouts", METRIC, "rollouts/s", contest, against=against, load_average=round(os.getloadavg()[0], 1))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentlightning-python", default="", help="an interpreter that has agentlightning==0.3.0")
    parser.add_argument("--rollouts", type=int, default=500, help="in one turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.agentlightning_python:
        asyncio.run(compare(options))
    else:
        report_absent("rollouts", METRIC, "rollouts/s", "no --agentlightning-python")


if __name__ == "__main__":
    main()
