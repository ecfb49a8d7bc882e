"""What a rollout of one model call costs a stack: CPU of its services, and the time from `enqueue` until the agent begins.

The agent and its grader are the demo's; the model answers at once. The stack is `agl-otel up`; the CPU of the runner, the agent and the
model is not counted. The first rollouts of a stack are not measured.

python -m bench.rollout                       # against the bars
python -m bench.rollout --against=../earlier  # in turns with another checkout, whose environment is set up (`make setup`)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, Final

import aiohttp

from agl_otel.queue.client import QueueClient
from agl_otel.settings import without_settings
from agl_otel.types import LLM, EnqueueRolloutRequest
from bench.harness import Turn, below, cpu_seconds, free_port, percentile, process, report, report_against_bar, run_bench, take_turns
from bench.start import ROOT, up

STEP: Final = 128  # rollouts of a step of the demo
IDLE: Final = 200  # rollouts that are enqueued one by one
WARM_UP: Final = 20
CPU_BAR_MS: Final = 6.0
START_BAR_MS: Final = 15.0  # or two fsyncs, where the disk is slower
FSYNCS: Final = 200
AGENT: Final = """
import time

def agent(task):
    with open(task["where"], "a") as begun:
        print(time.time() - task["sent"], file=begun, flush=True)
"""


@contextlib.asynccontextmanager
async def stack(tree: Path, *runner: str) -> AsyncGenerator[tuple[QueueClient, list[int]]]:
    """Run a stack of a checkout, and a runner with these arguments; yield a client of the queue and the pids of the stack."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder, up(tree) as begun:
        command = [tree / ".venv" / "bin" / "python", "-m", "agl_otel.runner", "--store", begun.address, *runner]
        child = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=without_settings(os.environ), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with QueueClient(begun.address, timeout_seconds=120) as queue:
                yield queue, [begun.pid, *below(begun.pid)]
        finally:
            child.terminate()
            await child.wait()


async def finish(queue: QueueClient, tasks: list[EnqueueRolloutRequest]) -> None:
    """Enqueue rollouts and wait until they have succeeded."""
    ids = [rollout.rollout_id for rollout in await queue.enqueue(tasks)]
    async for done in queue.wait(ids, timeout_seconds=120):
        assert all(rollout.status == "succeeded" for rollout in done), done


async def barrier(queue: QueueClient) -> None:
    """Wait until the spans of all rollouts are stored."""
    collector = (await queue.describe()).collector_http
    async with aiohttp.ClientSession() as session, session.post(f"{collector}/barrier") as answer:
        assert answer.status == 200, await answer.text()


async def cpu(tree: Path, steps: int) -> float:
    """Return the milliseconds of CPU of the services for a rollout."""
    port = free_port()
    demo = ROOT / "examples" / "first_light"
    runner = ("--function", f"{demo}/agent.py:answer", "--grader", f"{demo}/grade.py:grade", "--concurrency", "32")
    async with (
        process([sys.executable, "-m", "bench.proxy", "--model", str(port)], os.environ, port),
        stack(tree, *runner) as (queue, pids),
    ):
        update = await queue.put_resources({"llm": LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="policy")})
        task = EnqueueRolloutRequest(input={"question": "digit 437", "expected": "7"}, mode="train", resources_id=update.resources_id)
        await finish(queue, [task] * STEP)
        await barrier(queue)
        before = sum(map(cpu_seconds, pids))
        for _ in range(steps):
            await finish(queue, [task] * STEP)
        await barrier(queue)
        return (sum(map(cpu_seconds, pids)) - before) / (steps * STEP) * 1000


@contextlib.contextmanager
def agent() -> Generator[tuple[str, Path]]:
    """Make AGENT; yield its name for a runner, and the file into which it writes."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        program, begun = Path(folder, "agent.py"), Path(folder, "begun")
        program.write_text(AGENT)
        begun.touch()
        yield f"{program}:agent", begun


async def start(tree: Path, _: int) -> float:
    """Return the 99th percentile of the milliseconds from `enqueue` to the first line of the agent, one rollout at a time."""
    with agent() as (function, begun), begun.open() as lines:
        async with stack(tree, "--function", function) as (queue, _pids):
            for _ in range(WARM_UP + IDLE):
                await finish(queue, [EnqueueRolloutRequest(input={"sent": time.time(), "where": str(begun)})])
                await asyncio.sleep(random.uniform(0.01, 0.05))  # idle again
        seconds = [float(line) for line in lines][WARM_UP:]
    assert len(seconds) == IDLE
    return percentile(seconds, 0.99) * 1000


def two_fsyncs() -> float:
    """Return twice the 99th percentile of the milliseconds of an fsync after a small write."""
    seconds: list[float] = []
    with tempfile.TemporaryFile() as file:
        for _ in range(FSYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return 2 * percentile(seconds, 0.99) * 1000


FIGURES: Final[tuple[tuple[str, Callable[[], float], Callable[[Path, int], Coroutine[Any, Any, float]]], ...]] = (
    ("CPU of the services for a rollout of one call", lambda: CPU_BAR_MS, cpu),
    ("enqueue to agent function entered, p99", lambda: max(START_BAR_MS, two_fsyncs()), start),
)
"""(what, bar in milliseconds, the figure of a checkout)"""


async def main(options: argparse.Namespace) -> None:
    """Measure each figure `rounds` times."""

    def turn(figure: Callable[[Path, int], Coroutine[Any, Any, float]], tree: Path) -> Turn:
        return lambda: figure(tree, options.steps)

    for what, bar, figure in FIGURES:
        if options.only not in what:
            continue
        if options.against is None:
            ours = [await figure(ROOT, options.steps) for _ in range(options.rounds)]
        else:
            contest = await take_turns(turn(figure, ROOT), turn(figure, options.against.absolute()), rounds=options.rounds)
            report("rollout", what, "ms", contest, against=str(options.against), load_average=round(os.getloadavg()[0], 1))
            ours = contest.ours
        report_against_bar("rollout", what, statistics.median(ours), "ms", bar(), load_average=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--steps", type=int, default=4, help=f"steps of {STEP} rollouts in a turn")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="only figures with this text in their name")
    run_bench(main(parser.parse_args()))
