"""Latency of an idle queue, rate of claims from a deep one, and latency of status queries on a large one.

start   from `enqueue` to the first line of the agent function, one rollout at a time: queue, collector and runner as real processes.
depth   claims with 100,000 rollouts waiting against claims with 100 waiting, each in its own queue, one client.
status  a dashboard's queries at 1,000,000 rollouts: counts, a page of one status, one rollout by id.

python -m bench.queue_shapes [start|depth|status] [--rollouts N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from agl_otel.queue.client import AttemptUpdate, QueueClient
from agl_otel.types import EnqueueRolloutRequest
from bench.harness import percentile, report, report_against_bar, run_bench, services, take_turns

START_BAR_MS: Final = 25.0
STATUS_BAR_MS: Final = 10.0
DEEP: Final = 100_000
SHALLOW: Final = 100
FILLED_AT_ONCE: Final = 10_000
WARM_UP: Final = 20  # rollouts that are not counted
AGENT: Final = """
import time

def agent(task):
    with open(task["where"], "a") as answers:
        print(time.time() - task["sent"], file=answers, flush=True)
"""


@contextlib.asynccontextmanager
async def queue_at(folder: Path) -> AsyncGenerator[QueueClient]:
    """Run a queue on SQLite, and connect to it."""
    async with services(folder, "queue") as made, QueueClient(made.queue, timeout_seconds=120) as client:
        yield client


async def fill(client: QueueClient, count: int) -> str:
    """Enqueue `count` rollouts; return the id of the last."""
    last = ""
    for begun in range(0, count, FILLED_AT_ONCE):
        tasks = [EnqueueRolloutRequest(input={"n": n}, mode="train") for n in range(begun, min(begun + FILLED_AT_ONCE, count))]
        last = (await client.enqueue(tasks))[-1].rollout_id
    return last


# --- start


async def start(options: argparse.Namespace, folder: Path) -> None:
    """See the module."""
    (folder / "agent.py").write_text(AGENT)
    answers = folder / "answers"
    answers.touch()
    runner = [sys.executable, "-m", "agl_otel.runner", "--function", f"{folder / 'agent.py'}:agent", "--store"]
    async with services(folder / "stack", "queue", "collector") as made, QueueClient(made.queue) as client:
        child = await asyncio.create_subprocess_exec(*runner, made.queue, env=made.environment, stdout=asyncio.subprocess.DEVNULL)
        try:
            for _ in range(WARM_UP + options.rollouts):
                task = {"sent": time.time(), "where": str(answers)}
                [rollout] = await client.enqueue([EnqueueRolloutRequest(input=task)])
                async for _ in client.wait([rollout.rollout_id], timeout_seconds=60):
                    pass
                await asyncio.sleep(random.uniform(0.01, 0.05))  # idle again
        finally:
            child.terminate()
            await child.wait()
    seconds = [float(line) for line in answers.read_text().split()][WARM_UP:]
    if len(seconds) != options.rollouts:
        raise RuntimeError(f"{len(seconds)} of {options.rollouts} agents have run")
    more = {"p50": round(percentile(seconds, 0.5) * 1000, 2), "rollouts": len(seconds), "load_average": round(os.getloadavg()[0], 1)}
    report_against_bar("queue", "enqueue to agent function entered, p99", percentile(seconds, 0.99) * 1000, "ms", START_BAR_MS, **more)


# --- depth


def claims_of(client: QueueClient, calls: int) -> Callable[[], Awaitable[float]]:
    """Make a turn that claims one by one, then enqueues as many (unmeasured); it measures claims a second."""

    async def turn() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            assert len(await client.claim(1, worker_id="bench")) == 1
        rate = calls / (time.perf_counter() - began)
        await fill(client, calls)
        return rate

    return turn


async def depth(options: argparse.Namespace, folder: Path) -> None:
    """See the module."""
    for name in ("deep", "shallow"):
        (folder / name).mkdir()
    async with queue_at(folder / "deep") as deep, queue_at(folder / "shallow") as shallow:
        await fill(deep, DEEP)
        await fill(shallow, SHALLOW)
        contest = await take_turns(claims_of(deep, SHALLOW), claims_of(shallow, SHALLOW), rounds=options.rounds)
    load = round(os.getloadavg()[0], 1)
    report("queue", f"claims with {DEEP} waiting", "claims/s", contest, against=f"claims with {SHALLOW} waiting", load_average=load)


# --- status


async def status(options: argparse.Namespace, folder: Path) -> None:
    """See the module."""
    async with queue_at(folder) as client:
        last = await fill(client, options.held)
        for number in range(20):
            outcome: Any = "failed" if number % 4 == 0 else "succeeded"
            claims = await client.claim(500, worker_id="bench")
            ended = [AttemptUpdate(rollout_id=c.rollout_id, attempt_id=c.attempt.attempt_id, status=outcome) for c in claims]
            await client.update_attempts(ended)
        queries: dict[str, Callable[[], Awaitable[object]]] = {
            "counts": client.statistics,
            "one rollout by id": lambda: client.query_rollouts(rollout_id_in=[last]),
            "a page of 20 that wait": lambda: client.query_rollouts(status_in=["queuing"], limit=20),
            "a page of 20 that succeeded": lambda: client.query_rollouts(status_in=["succeeded"], limit=20),
            "the 20 that failed last": lambda: client.query_rollouts(status_in=["failed"], sort_by="end_time", sort_order="desc", limit=20),
        }
        for name, ask in queries.items():
            spent: list[float] = []
            for number in range(WARM_UP + options.rollouts):
                began = time.perf_counter()
                await ask()
                if number >= WARM_UP:
                    spent.append(time.perf_counter() - began)
            more = {"p50": round(percentile(spent, 0.5) * 1000, 2), "load_average": round(os.getloadavg()[0], 1)}
            metric = f"{name} at {options.held} rollouts, p99"
            report_against_bar("queue", metric, percentile(spent, 0.99) * 1000, "ms", STATUS_BAR_MS, **more)


SHAPES: Final = {"start": start, "depth": depth, "status": status}


async def run(options: argparse.Namespace) -> None:
    """Run the requested shapes, each in its own folder."""
    for name in options.shapes or SHAPES:
        with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
            await SHAPES[name](options, Path(folder))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="all, unless named")
    parser.add_argument("--rollouts", type=int, default=300, help="rollouts to start, or queries to send")
    parser.add_argument("--held", type=int, default=1_000_000, help="rollouts in the queue during status queries")
    parser.add_argument("--rounds", type=int, default=5)
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()
