"""How light a stack is: seconds, CPU and memory until it is ready, of commands, and of an embedded store.

python -m bench.start                       # against the bars
python -m bench.start --against=../earlier  # in turns with another checkout, whose environment is set up (`make setup`)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.settings import PORTS, without_settings
from agl_otel.types.model import new_id
from bench.harness import Turn, below, cpu_seconds, report, report_against_bar, run_bench, take_turns

STORE: Final = """
import agl_otel as agl, asyncio

async def main():
    store = agl.InMemoryLightningStore()
    rollout = await store.enqueue_rollout({"n": 1})
    assert (await store.get_rollout_by_id(rollout.rollout_id)).input == {"n": 1}
    await store.close()

asyncio.run(main())
"""
ROOT: Final = Path(__file__).parents[1]


class Stack(NamedTuple):
    """A stack that `agl-otel up` has just started."""

    seconds: float
    cpu: float
    megabytes: float
    address: str
    pid: int


@contextlib.contextmanager
def up(tree: Path) -> Generator[Stack]:
    """Run `agl-otel up` of a checkout on free ports within the context."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        ports = [text for port in PORTS for text in (f"--{port.replace('_', '-')}", "0")]
        began = time.perf_counter()
        with command(tree, "up", "--data-dir", folder, "--json", *ports) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            seconds = time.perf_counter() - began
            pids = {process.pid, *below(process.pid)}
            yield Stack(seconds, sum(map(cpu_seconds, pids)), sum(map(megabytes, pids)), told["addresses"]["queue"], process.pid)
            process.terminate()
            process.wait()


@contextlib.contextmanager
def command(tree: Path, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a command of a checkout within the context, outside of any checkout and without settings."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        program = [tree / ".venv" / "bin" / "python", "-m", "agl_otel", *arguments]
        environment = without_settings(os.environ)
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=environment) as process:
            yield process


def megabytes(pid: int) -> float:
    """Return the memory of a process in MB; pages that it shares count in parts (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def seconds_of(tree: Path, *arguments: str) -> float:
    """Return the seconds that a command takes."""
    began = time.perf_counter()
    with command(tree, *arguments) as process:
        assert process.stdout is not None
        process.stdout.read()
        if process.wait():
            raise RuntimeError(f"`agl-otel {' '.join(arguments)}` ended with code {process.returncode}")
    return time.perf_counter() - began


def cpu_of(program: Sequence[str | Path], **environment: str) -> float:
    """Return the CPU seconds of a program with its processes."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run(program, check=True, cwd="/", env=without_settings(os.environ) | environment, stderr=subprocess.DEVNULL)
    return spent() - before


def store_cpu(tree: Path) -> float:
    """Return the CPU seconds of an InMemoryLightningStore from the import to its first rollout and its end, with its processes."""
    return cpu_of([tree / ".venv" / "bin" / "python", "-c", STORE])


def hook_cpu(tree: Path) -> float:
    """Return the CPU seconds that the hook adds to the start of an agent under opentelemetry-instrument: less than 0 where it saves some.

    It has the SDK set up, and a library instrumented when the agent imports it; without it each is instrumented at the start.
    """
    programs = tree / ".venv" / "bin"
    agent = [programs / "opentelemetry-instrument", programs / "python", "-c", "pass"]
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        (Path(folder) / "agl_otel_hook.py").write_text("def pre_instrument(): pass\ndef post_instrument(): pass\n")
        without = cpu_of(agent, PYTHONPATH=folder)
    return (
        cpu_of(agent, AGL_ROLLOUT_ID=new_id("ro"), AGL_ATTEMPT_ID=new_id("at"), OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9") - without
    )


def listing(tree: Path) -> float:
    """Return the seconds of `rollouts ls` on an empty stack of this checkout."""
    with up(ROOT) as stack:
        return seconds_of(tree, "rollouts", "ls", "--store", stack.address)


def of_a_start(pick: Callable[[Stack], float]) -> Callable[[Path], float]:
    """Return a figure of the start of a stack."""

    def figure(tree: Path) -> float:
        with up(tree) as stack:
            return pick(stack)

    return figure


FIGURES: Final[tuple[tuple[str, str, float, Callable[[Path], float]], ...]] = (
    ("up, until it is ready", "s", 1.2, of_a_start(lambda stack: stack.seconds)),
    ("up, CPU until it is ready", "s", 1.5, of_a_start(lambda stack: stack.cpu)),
    ("up, memory (PSS)", "MB", 260, of_a_start(lambda stack: stack.megabytes)),
    ("--help", "s", 0.25, lambda tree: seconds_of(tree, "--help")),
    ("rollouts ls", "s", 0.5, listing),
    ("InMemoryLightningStore, CPU to its first rollout and its end", "s", 0.5, store_cpu),
    ("hook, CPU added to the start of an agent", "s", 0.15, hook_cpu),
)
"""(what, unit, bar, the figure of a checkout)"""


async def main(options: argparse.Namespace) -> None:
    """Measure each figure `rounds` times."""

    def turn(figure: Callable[[Path], float], tree: Path) -> Turn:
        return lambda: asyncio.to_thread(figure, tree)

    for what, unit, bar, figure in FIGURES:
        if options.only not in what:
            continue
        if options.against is None:
            ours = [figure(ROOT) for _ in range(options.rounds + 1)][1:]
        else:
            contest = await take_turns(turn(figure, ROOT), turn(figure, options.against.absolute()), rounds=options.rounds)
            report("start", what, unit, contest, against=str(options.against))
            ours = contest.ours
        report_against_bar("start", what, statistics.median(ours), unit, bar)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="only figures with this text in their name")
    run_bench(main(parser.parse_args()))
