"""Comparative benchmarks: ours and a baseline take turns in one run, and the result is the ratio.

On shared cores, absolute figures vary by half between runs; the ratio of adjacent turns does not. Each result is one line of JSON:
{"bench", "metric", "value", "unit", "baseline", "ratio", "against"}, where "against" describes the baseline. A bench ends with code 1 if a
figure with a bar misses it (`run_bench`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from agl_otel.settings import Settings
from agl_otel.settings import free_port as free_port

Turn = Callable[[], Awaitable[float]]
"""One turn of a contender: does the work and returns the measured figure."""


class Contest(NamedTuple):
    """Figures of the turns of `ours` and of `baseline`, in the order they were taken."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratio(self) -> float:
        """Median over the rounds of ours divided by the baseline."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.ours, self.baseline, strict=True))


async def take_turns(ours: Turn, baseline: Turn, *, rounds: int) -> Contest:
    """Run both `rounds` times after one unmeasured turn each, alternating which is first."""
    await ours()
    await baseline()
    contest = Contest([], [])
    for number in range(rounds):
        pair = [(ours, contest.ours), (baseline, contest.baseline)]
        for turn, figures in pair if number % 2 == 0 else reversed(pair):
            figures.append(await turn())
    return contest


_missed: Final[list[str]] = []


def report(bench: str, metric: str, unit: str, contest: Contest, *, against: str, bar: float | None = None, **more: object) -> None:
    """Print the medians, their ratio and the fields of `more` as one line of JSON. The ratio should be at least `bar`."""
    result = {
        "bench": bench,
        "metric": metric,
        "value": round(statistics.median(contest.ours), 3),
        "unit": unit,
        "baseline": round(statistics.median(contest.baseline), 3),
        "ratio": round(contest.ratio, 3),
        "against": against,
        **({} if bar is None else {"bar": bar}),
        **more,
    }
    print(json.dumps(result), flush=True)
    if bar is not None and contest.ratio < bar:
        _missed.append(metric)


def report_against_bar(bench: str, metric: str, value: float, unit: str, bar: float, **more: object) -> None:
    """Print a figure with its fixed bar; the ratio should be at most 1."""
    line = {"bench": bench, "metric": metric, "value": round(value, 3), "unit": unit, "baseline": bar, "ratio": round(value / bar, 3)}
    print(json.dumps({**line, "against": "the bar", **more}), flush=True)
    if value > bar:
        _missed.append(metric)


def report_absent(bench: str, metric: str, unit: str, reason: str) -> None:
    """Print that a baseline is unavailable, and why."""
    line = {"bench": bench, "metric": metric, "value": None, "unit": unit, "baseline": None, "ratio": None, "against": f"absent: {reason}"}
    print(json.dumps(line), flush=True)


def run_bench(main: Coroutine[object, object, None]) -> None:
    """Run a bench. Raises SystemExit with code 1 if a figure missed its bar."""
    asyncio.run(main)
    if _missed:
        print(f"missed the bar: {'; '.join(_missed)}", file=sys.stderr)
        raise SystemExit(1)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextlib.asynccontextmanager
async def process(command: Sequence[str], environment: Mapping[str, str], port: int, *, start_seconds: float = 60.0) -> AsyncGenerator[int]:
    """Run a child process that must listen on `port` within `start_seconds`; yield its pid, and stop it at the end of the context."""
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
    """Services of a fresh stack, as processes."""

    settings: Settings
    environment: Mapping[str, str]
    """Environment for further processes of the stack."""
    pids: Mapping[str, int]

    @property
    def queue(self) -> str:
        """The queue's host:port."""
        return f"127.0.0.1:{self.settings.queue_port}"

    @property
    def otlp(self) -> str:
        """URL of the collector's OTLP over HTTP."""
        return f"http://127.0.0.1:{self.settings.otlp_http_port}"

    @property
    def clickhouse(self) -> str:
        """URL of ClickHouse's HTTP protocol."""
        return f"http://127.0.0.1:{self.settings.clickhouse_port}"

    @property
    def proxy(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.settings.proxy_port}"

    async def barrier(self) -> None:
        """Wait until everything acknowledged is stored."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.otlp}/barrier") as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def services(folder: Path, *names: str, start_seconds: float = 60.0) -> AsyncGenerator[Services]:
    """Run these services ("queue", "collector", "proxy") on free ports within the context, with their data in `folder`."""
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


@contextlib.asynccontextmanager
async def store_command(folder: Path) -> AsyncGenerator[tuple[str, str]]:
    """Run `agl-otel store` on a data directory; yield its URL and the host:port of Jaeger's remote storage."""
    jaeger = free_port()
    program = str(Path(sys.executable).with_name("agl-otel"))
    command = [program, "store", "--port", "0", "--queue-port", "0", "--data-dir", str(folder), "--json"]
    environment = {**os.environ, "AGL_JAEGER_PORT": str(jaeger)}
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(180):
            started = json.loads(await child.stdout.readline())
        yield started["url"], f"127.0.0.1:{jaeger}"
    finally:
        child.terminate()
        await child.wait()


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
    """Return the CPU seconds of a process, over all threads: by its CPU clock, as /proc counts in ticks of 1/100 s."""
    return time.clock_gettime(~pid << 3 | 2)  # the id of that clock on Linux (clock_getcpuclockid)


def below(pid: int) -> list[int]:
    """List the running descendants of a process, parents before their children."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the process has ended
                found += map(int, children.read_text().split())
    return found[1:]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
