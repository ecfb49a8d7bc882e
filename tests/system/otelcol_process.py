"""The OpenTelemetry Collector of collector/otelcol as a process, with the configurations that users get, beside a real queue and server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.errors import UnavailableError
from agl_otel.queue.client import QueueClient
from agl_otel.settings import free_ports
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer

ROOT = Path(__file__).parents[2]
BINARY = Path(os.environ.get("AGL_OTELCOL") or ROOT / "build" / "otelcol" / "agl-otelcol")
CONFIGS = ROOT / "deploy" / "otelcol"
START_SECONDS = 300.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OTEL_"))}


def binary() -> Path:
    """Return the path of the collector's binary; skip the test if it has not been built."""
    if not BINARY.exists():
        pytest.skip(f"{BINARY} is missing: build it with `make otelcol` (needs Go)")
    return BINARY


@dataclass
class Otelcol:
    """One collector process with the configuration `config`."""

    config: str
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    ports: list[int] = field(default_factory=lambda: free_ports(4))

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.ports[3]}/metrics"

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start a process; it may not be ready on return."""
        names = ("AGL_OTLP_GRPC_PORT", "AGL_OTLP_HTTP_PORT", "AGL_OTELCOL_HEALTH_PORT", "AGL_OTELCOL_METRICS_PORT")
        ports = {name: str(port) for name, port in zip(names, self.ports, strict=True)}
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [binary(), "--config", CONFIGS / f"{self.config}.yaml"],
                stdout=out, stderr=out, env={**ENVIRONMENT, "AGL_HOST": "127.0.0.1", **ports, **self.environment},
            )  # fmt: skip

    async def start(self) -> None:
        """Start it (again); it accepts spans on return."""
        self.process = self.spawn()
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_SECONDS):
            while not await self._healthy(session):
                assert self.process.poll() is None, f"the collector ended:\n{self.log.read_text()[-3000:]}"
                await asyncio.sleep(0.05)

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"http://127.0.0.1:{self.ports[2]}/") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def end(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; return its exit status."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, 300)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(300)


@dataclass
class World:
    """A queue, a ClickHouse server with our schema, and collectors."""

    directory: Path
    server: ClickHouseServer
    queue_port: int = field(default_factory=lambda: free_ports(1)[0])
    token: str = ""
    collectors: list[Otelcol] = field(default_factory=list[Otelcol])
    queue_process: subprocess.Popen[bytes] | None = None

    @property
    def queue(self) -> str:
        return f"127.0.0.1:{self.queue_port}"

    @property
    def sql(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    def client(self) -> QueueClient:
        return QueueClient(self.queue, token=self.token)

    def reader(self, *collectors: Otelcol) -> TraceReader:
        return TraceReader(self.sql, collectors=[each.http for each in collectors])

    def fresh_schema(self) -> None:
        """Empty the tables. The server may abort on what a killed collector left, and is then restarted."""
        for left in (2, 1, 0):
            self.server.must_run()
            engine = ServerEngine(ServerAddress.parse(self.server.url()))
            try:
                engine.command("DROP DATABASE IF EXISTS otel SYNC")
                create_schema(engine, where="the test")
                return
            except UnavailableError:
                if not left:
                    raise
            finally:
                engine.close()

    def spawn_queue(self) -> subprocess.Popen[bytes]:
        """Start a queue process on the same data; it may not be ready on return."""
        settings = {"AGL_HOST": "127.0.0.1", "AGL_QUEUE_PORT": str(self.queue_port), "AGL_DATA_DIR": str(self.directory / "queue")}
        settings["AGL_TOKEN"] = self.token
        with (self.directory / "queue.log").open("ab") as out:
            return subprocess.Popen([sys.executable, "-m", "agl_otel.queue"], stdout=out, stderr=out, env={**ENVIRONMENT, **settings})

    async def start_queue(self) -> None:
        """Start the queue (again); it answers on return."""
        self.queue_process = self.spawn_queue()
        async with QueueClient(self.queue, token=self.token, retry_seconds=START_SECONDS) as client:
            await client.describe()

    async def end_queue(self) -> None:
        assert self.queue_process is not None
        self.queue_process.terminate()
        await asyncio.to_thread(self.queue_process.wait, 30)

    async def collector(self, config: str = "all-in-one", **environment: str) -> Otelcol:
        """Start a new collector."""
        settings = {
            "AGL_STORE": self.queue,
            "AGL_OTELCOL_CLICKHOUSE": f"clickhouse://127.0.0.1:{self.server.tcp_port}",
            "AGL_OTELCOL_ANNOUNCE_CLICKHOUSE": self.sql,
            "AGL_OTELCOL_FLUSH": "20ms",
            "AGL_TOKEN": self.token,
            "AGL_DATA_DIR": str(self.directory / "collector"),
            **environment,
        }
        made = Otelcol(config, self.directory / f"{config}.log", settings)
        self.collectors.append(made)
        await made.start()
        return made

    def close(self) -> None:
        for each in self.collectors:
            each.close()
        if self.queue_process is not None:
            self.queue_process.kill()
            self.queue_process.wait(300)


async def post(
    session: aiohttp.ClientSession, collector: Otelcol, request: ExportTraceServiceRequest | bytes, **headers: str
) -> aiohttp.ClientResponse:
    """Send one OTLP/HTTP request; return the response with its body read."""
    sent = {"Content-Type": "application/x-protobuf", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = request if isinstance(request, bytes) else request.SerializeToString()
    async with session.post(f"{collector.http}/v1/traces", data=data, headers=sent) as response:
        await response.read()
        return response
