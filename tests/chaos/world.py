"""Real processes of one scenario: a queue, a collector, maybe a ClickHouse server, load on them; and what happened to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from agl_otel.errors import UnavailableError
from agl_otel_hook import conventions
from tests.chaos.check import Tally, acked_ids, check
from tests.chaos.load import Config, command
from tests.clickhouse_server import ClickHouseServer
from tests.contract.collector import stack as stacks
from tests.contract.collector.otlp import post_spans, request_of, span
from tests.contract.collector.test_crash import KILLED_AT

ROOT: Final = Path(__file__).parents[2]
MEMORY_BYTES: Final = 3 << 30  # what a collector may ever hold, ClickHouse inside it
SMALL_SIZES: Final = (1, 3, 30)
QUICK_PAUSE_SECONDS: Final = 0.02
POINT_SECONDS: Final = 120.0  # for a collector to come by a fault point
PATIENCE_SECONDS: Final = 300.0  # for what will come; machines are busy
FINE: Final = ("", "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "503")
"""Answers that a sender may get while something is away, beside "away …"."""


@dataclass
class World:
    """One scenario's processes and findings."""

    directory: Path
    chance: random.Random
    full: bool
    stack: stacks.Stack
    server: ClickHouseServer | None = None
    share: float = 1.0
    """Of the full run's kills, rounds and requests."""
    kills: int = 0
    peak_bytes: int = 0
    """The largest resident size of any collector."""
    problems: list[str] = field(default_factory=list[str])
    """What went wrong beside the spans."""
    reached: set[str] = field(default_factory=set[str])
    """Fault points at which a collector was killed."""
    acks: list[Path] = field(default_factory=list[Path])
    answers: Counter[str] = field(default_factory=Counter[str])
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def amount(self, full: int, quick: int) -> int:
        """How much of something: in the full run (or a share of it), or in the small one."""
        return max(1, round(full * self.share)) if self.full else quick

    @property
    def acked(self) -> int:
        """Spans that were acked so far."""
        return sum(len(acked_ids(path)) for path in self.acks)

    async def start(self) -> None:
        """Start everything."""
        if self.server is not None:
            self.server.start()
        await self.stack.start_queue()
        await self.stack.start_collector()

    @contextlib.asynccontextmanager
    async def load(self, run: str, **options: Any) -> AsyncGenerator[Config]:
        """Load for as long as the block runs; its acks count, and every answer must be one that a client may get."""
        if not self.full:  # leave the machine to the other tests
            options = {
                "sizes": SMALL_SIZES,
                "senders": 3,
                **options,
                "pause_seconds": max(QUICK_PAUSE_SECONDS, options.get("pause_seconds", 0)),
            }
        made = Config(
            run, self.stack.http, self.stack.grpc, str(self.directory / f"{run}.acks"),
            first_sender=1 + 100 * len(self.acks), **options,
        )  # fmt: skip
        self.acks.append(Path(made.acks))
        process = self._spawn_load(made)
        try:
            await self.until(lambda: Path(made.acks).exists(), "the load starts")
            yield made
        finally:
            process.terminate()
            status = await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
        answers: Counter[str] = Counter(json.loads(Path(made.acks).with_suffix(".json").read_text())) if not status else Counter()
        self.answers += answers
        self.expect(status == 0, f"the load ended with {status}")
        for answer in answers:
            self.expect(answer in FINE or answer.startswith("away"), f"a sender was answered {answer!r}")

    def _spawn_load(self, config: Config) -> subprocess.Popen[bytes]:
        with (self.directory / "load.log").open("ab") as log:
            process = subprocess.Popen(command(config), cwd=ROOT, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def expect(self, true: bool, problem: str) -> None:
        """Note `problem` where something does not hold."""
        if not true:
            self.problems.append(problem)

    async def until(self, condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait for a condition. Raises TimeoutError with `what`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
            await asyncio.sleep(0.02)

    async def more_acked(self, spans: int) -> None:
        """Wait until so many more spans are acked."""
        enough = self.acked + spans
        await self.until(lambda: self.acked >= enough, f"{spans} more spans are acked")

    async def health(self) -> dict[str, Any]:
        """What the collector says of itself."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.stack.http}/health") as response:
            return await response.json()

    async def degraded(self) -> bool:
        """Whether the collector cannot write at the moment."""
        return (await self.health())["status"] == "degraded"

    async def kill(self, service: str = "collector") -> None:
        """kill -9."""
        self.note_memory()
        await self.stack.end(service, signal.SIGKILL)
        self.kills += 1

    async def killed_at(self, point: str, nth: int) -> None:
        """Start a collector that ends by kill -9 when it comes by `point` for the nth time, and wait for that (or end it by hand)."""
        process = self.stack.spawn("collector", "-c", KILLED_AT.format(point=point, nth=nth))
        try:
            status = await asyncio.to_thread(process.wait, POINT_SECONDS)
            self.reached.add(point)
        except subprocess.TimeoutExpired:  # not reached that often in this time; killed all the same
            process.kill()
            status = await asyncio.to_thread(process.wait)
        self.expect(status == -signal.SIGKILL, f"the collector ended by itself at {point!r} ({status})")
        del self.stack.processes["collector"]
        self.kills += 1

    def note_memory(self) -> None:
        """Remember the collector's peak."""
        process = self.stack.processes.get("collector")
        with contextlib.suppress(OSError, StopIteration):
            assert process is not None
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM:"))
            self.peak_bytes = max(self.peak_bytes, int(peak.split()[1]) << 10)

    async def still_serves(self) -> None:
        """The collector takes a span, it is readable, and the memory is bounded."""
        rollout = f"ro-after-{os.urandom(6).hex()}"
        await post_spans(self.stack, request_of([span()], {conventions.ROLLOUT_ID: rollout}), ack="stored")
        async with self.stack.reader() as reader:
            self.expect(len(await reader.spans([rollout])) == 1, "a span that was acked as stored is not readable")
        self.note_memory()
        self.expect(self.peak_bytes < MEMORY_BYTES, f"the collector held {self.peak_bytes >> 20} MiB")

    def note_server(self) -> None:
        """Say it where the ClickHouse server has ended by itself."""
        if self.server is not None:
            try:
                self.server.must_run()
            except (AssertionError, pytest.fail.Exception) as error:
                self.problems.append(str(error))

    async def tally(self) -> Tally:
        """What was acked against what is readable. A server that has just aborted is started again: it is waited for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                async with self.stack.reader() as reader:
                    return await check(reader, self.acks)
            except UnavailableError:
                if self.server is None or time.monotonic() > deadline:
                    raise
                await asyncio.to_thread(self.server.must_run)
                await asyncio.sleep(0.2)

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(30)
        self.stack.close()
        if self.server is not None:
            self.server.signal(signal.SIGCONT)
            self.server.kill()


def new_world(directory: Path, *, seed: int, full: bool, share: float, on_server: bool, **settings: Any) -> World:
    """A world, not started."""
    directory.mkdir(parents=True, exist_ok=True)
    made = stacks.new_stack(directory)
    stack = stacks.Stack(made.settings, made.log)
    server = ClickHouseServer(directory / "server") if on_server else None
    if server is not None:
        settings["clickhouse_url"] = server.url()
    stack.settings = stack.settings.model_copy(update=settings)
    return World(directory, random.Random(seed), full, stack, server, share)
