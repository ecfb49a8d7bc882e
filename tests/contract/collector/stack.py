"""A queue and a collector as real processes on free ports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp

from agl_otel.service.processes import die_with_parent
from agl_otel.settings import Settings
from agl_otel.traces.reader import TraceReader

START_SECONDS = 300.0
T = TypeVar("T")


@dataclass
class Stack:
    """A queue and a collector on one data directory."""

    settings: Settings
    log: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])
    before: Sequence[str] = ()
    """Put before the collector's command line; it must exec the rest."""

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.settings.otlp_http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings.otlp_grpc_port}"

    @property
    def sql(self) -> str:
        return f"http://127.0.0.1:{self.settings.clickhouse_port}"

    @property
    def queue(self) -> str:
        return f"127.0.0.1:{self.settings.queue_port}"

    def reader(self) -> TraceReader:
        return TraceReader(self.sql, collectors=[self.http], token=self.settings.token.get_secret_value())

    def spawn(self, service: str, *args: str) -> subprocess.Popen[bytes]:
        """Start a service; `args` may be ("-c", code)."""
        environment = {**os.environ, **self.settings.environment(), **self.environment}
        before = self.before if service == "collector" else ()
        with self.log.open("ab") as out:
            command = [*before, sys.executable, *(args or ("-m", f"agl_otel.{service}"))]
            process = subprocess.Popen(die_with_parent(command), env=environment, stdout=out, stderr=out)
        self.processes[service] = process
        return process

    async def start_queue(self) -> None:
        self.spawn("queue")

    async def start_collector(self, *args: str) -> None:
        process = self.spawn("collector", *args)
        await self.wait_healthy(process)

    async def wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_SECONDS):
            while True:
                assert process.poll() is None, f"the collector ended with {process.returncode}:\n{self.log.read_text()}"
                try:
                    async with session.get(f"{self.http}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)

    async def end(self, service: str, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(service)
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, 300)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(300)


async def until(ask: Callable[[], Awaitable[T]], answer: Callable[[T], bool]) -> T:
    """Repeat `ask` until the result is right."""
    async with asyncio.timeout(300):
        while not answer(found := await ask()):  # noqa: ASYNC110 - the condition is in another process
            await asyncio.sleep(0.02)
        return found


def new_stack(directory: Path) -> Stack:
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    settings = Settings.load(data_dir=directory / "data", **ports).with_ports()
    return Stack(settings, directory / "services.log")


async def start(made: Stack) -> None:
    await made.start_queue()
    await made.start_collector()
