"""Benchmarks that compare: ours and a baseline take turns in one run, and the result is a ratio.

Absolute figures swing by half from run to run on shared cores; a ratio of neighbouring turns does not. Each result is one JSON object
a line: {"bench", "metric", "value", "unit", "baseline", "ratio"}, and "against", which says in words what the baseline is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp

from agl_otel.settings import Settings
from agl_otel.settings import free_port as free_port

Turn = Callable[[], Awaitable[float]]
"""One turn of a contender: does the work, answers the measured figure."""


class Contest(NamedTuple):
    """What is compared: `ours` and `baseline` are the figures of the turns, in the order they were taken."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratio(self) -> float:
        """The median over the rounds of ours divided by the baseline."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.ours, self.baseline, strict=True))


async def take_turns(ours: Turn, baseline: Turn, *, rounds: int) -> Contest:
    """Run both `rounds` times after one unmeasured turn each; who begins changes from round to round."""
    await ours()
    await baseline()
    contest = Contest([], [])
    for number in range(rounds):
        pair = [(ours, contest.ours), (baseline, contest.baseline)]
        for turn, figures in pair if number % 2 == 0 else reversed(pair):
            figures.append(await turn())
    return contest


def report(bench: str, metric: str, unit: str, contest: Contest, *, against: str, **more: object) -> None:
    """Print the medians and their ratio as one line of JSON, and whatever `more` there is to say."""
    result = {
        "bench": bench,
        "metric": metric,
        "value": round(statistics.median(contest.ours), 3),
        "unit": unit,
        "baseline": round(statistics.median(contest.baseline), 3),
        "ratio": round(contest.ratio, 3),
        "against": against,
        **more,
    }
    print(json.dumps(result), flush=True)


def report_against_bar(bench: str, metric: str, value: float, unit: str, bar: float, **more: object) -> None:
    """Print a figure that is held to a fixed bar; the ratio is to be at most 1."""
    line = {"bench": bench, "metric": metric, "value": round(value, 3), "unit": unit, "baseline": bar, "ratio": round(value / bar, 3)}
    print(json.dumps({**line, "against": "the bar", **more}), flush=True)


def report_absent(bench: str, metric: str, unit: str, reason: str) -> None:
    """Print that a baseline could not be had, and why."""
    line = {"bench": bench, "metric": metric, "value": None, "unit": unit, "baseline": None, "ratio": None, "against": f"absent: {reason}"}
    print(json.dumps(line), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextlib.asynccontextmanager
async def process(command: Sequence[str], environment: Mapping[str, str], port: int, *, start_seconds: float = 60.0) -> AsyncGenerator[int]:
    """A child process that listens on `port` within `start_seconds`, until the block ends; answers its pid."""
    child = await asyncio.create_subprocess_exec(
        *command, env=dict(environment), stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await _listening(child, port, start_seconds)
        yield child.pid
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


@dataclass(frozen=True)
class Services:
    """Services of a fresh stack, real processes."""

    settings: Settings
    environment: Mapping[str, str]
    """Of processes that belong to the stack."""
    pids: Mapping[str, int]

    @property
    def queue(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.settings.queue_port}"

    @property
    def otlp(self) -> str:
        """The collector's HTTP address."""
        return f"http://127.0.0.1:{self.settings.otlp_http_port}"

    @property
    def clickhouse(self) -> str:
        """The address of ClickHouse's HTTP protocol."""
        return f"http://127.0.0.1:{self.settings.clickhouse_port}"

    @property
    def proxy(self) -> str:
        """The proxy's address."""
        return f"http://127.0.0.1:{self.settings.proxy_port}"

    async def barrier(self) -> None:
        """Wait until all that was acknowledged is stored."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.otlp}/barrier") as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def services(folder: Path, *names: str, start_seconds: float = 60.0) -> AsyncGenerator[Services]:
    """These services ("queue", "collector", "proxy") on free ports, with their data in `folder`, until the block ends."""
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port"), 0)
    settings = Settings.load(data_dir=folder, **ports).with_ports()
    environment = {**os.environ, **settings.environment(), "AGL_LOG_LEVEL": "ERROR"}
    listens = {"queue": settings.queue_port, "collector": settings.clickhouse_port, "proxy": settings.proxy_port}
    async with contextlib.AsyncExitStack() as held:
        pids: dict[str, int] = {}
        for name in names:
            command = [sys.executable, "-m", f"agl_otel.{name}"]
            pids[name] = await held.enter_async_context(process(command, environment, listens[name], start_seconds=start_seconds))
        yield Services(settings, environment, pids)


async def _listening(child: asyncio.subprocess.Process, port: int, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if child.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"process {child.pid} does not listen on port {port} (exit code {child.returncode})") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0  # in ticks of 1/100 s on Linux


def below(pid: int) -> list[int]:
    """The processes that come of this one and still run, children before their own."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                found += map(int, children.read_text().split())
    return found[1:]


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
