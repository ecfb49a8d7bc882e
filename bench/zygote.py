"""Rate of starting agents: forks of a warm parent against a fresh `opentelemetry-instrument python agent.py` each.

The agent imports openai, calls a model that responds at once, and exports its spans to a receiver. The benchmark fails unless all spans
arrive with ids and seals. Agents run two at a time, as on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from agl_otel.runner.starting import FreshStarter, Starter, WarmStarter
from agl_otel_hook import conventions
from bench.harness import Turn, report, take_turns
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

AGENT = """
from openai import OpenAI

answer = OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "2 + 2?"}])
print(answer.choices[0].message.content)
"""
AT_ONCE = 2


def turn(starter: Starter, runs: int, environment: dict[str, str], folder: Path, receiver: OtlpReceiver) -> Turn:
    """Make a turn that runs `runs` agents and measures agents a second."""

    async def one(places: asyncio.Semaphore, rollout_id: str, out: int) -> None:
        ids = {conventions.ENV_ROLLOUT_ID: rollout_id, conventions.ENV_ATTEMPT_ID: "at-1"}
        async with places:
            process = await starter.start([sys.executable, "agent.py"], environment | ids, folder, out, out)
            status = await process.wait()
            starter.release(process)
        if status != 0:
            raise RuntimeError(f"an agent ended with status {status}")

    async def agents_a_second() -> float:
        places = asyncio.Semaphore(AT_ONCE)
        names = [f"ro-{time.monotonic_ns()}-{n}" for n in range(runs)]
        with (folder / "out").open("ab") as out:
            began = time.perf_counter()
            await asyncio.gather(*(one(places, name, out.fileno()) for name in names))
            seconds = time.perf_counter() - began
        spans = [span for span in receiver.ours() if span.key[0] in names]
        counts = receiver.seals()
        if {span.key[0] for span in spans} != set(names) or any(span.marker not in counts for span in spans):
            raise RuntimeError("spans or seals of some agents have not arrived")
        return runs / seconds

    return agents_a_second


@asynccontextmanager
async def environment_of(receiver: OtlpReceiver) -> AsyncGenerator[dict[str, str]]:
    """Start a model server; yield the environment of agents that call it and export to the receiver."""
    model = ModelServer()
    await model.start()
    try:
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AGL_", "OPENAI_"))},
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "k",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_url,
        }
    finally:
        await model.stop()


async def compare(runs: int, rounds: int) -> None:
    """Take turns and report."""
    receiver = OtlpReceiver()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        anew = FreshStarter([str(Path(sys.executable).with_name("opentelemetry-instrument"))])
        warm = WarmStarter(anew)
        try:
            async with environment_of(receiver) as environment:
                contest = await take_turns(
                    turn(warm, runs, environment, folder, receiver), turn(anew, 2, environment, folder, receiver), rounds=rounds
                )
        finally:
            await warm.close()
            receiver.close()
    load = os.getloadavg()[0]
    report("zygote", "agent runs", "runs/s", contest, against="a fresh opentelemetry-instrument each", load_average=round(load, 1))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="forks in one turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    asyncio.run(compare(options.runs, options.rounds))


if __name__ == "__main__":
    main()
