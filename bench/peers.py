"""The receivers of spans that are compared: our collector and its peers, each a context manager around real processes.

Peers are installed once, outside the project, into $XDG_CACHE_HOME/agl-otel/peers (default ~/.cache). An unavailable peer raises
AbsentError with the reason, which is printed instead of its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.schema import create_schema
from bench.harness import free_port, process, services
from bench.load import Address
from tests.clickhouse_server import ClickHouseServer
from tests.environments import AbsentError, installed

ROOT: Final = Path(__file__).parents[1]
AGENTLIGHTNING: Final = ("agentlightning==0.3.0", "opentelemetry-sdk==1.38.0", "opentelemetry-exporter-otlp==1.38.0", "openai<2")
ROTEL: Final = ("rotel==0.0.1a15",)
VISIBLE_SECONDS: Final = 300.0
# The default table of the OpenTelemetry Collector's ClickHouse exporter.
DEFAULT_TABLE: Final = (Path(__file__).parent / "otel_default_table.sql").read_text()
Ids = Sequence[tuple[str, str]]


@dataclass
class Peer:
    """A server that takes OTLP traces."""

    name: str
    address: Address
    pids: Sequence[int]
    visible: Callable[[int], Awaitable[None]]
    """Wait until so many more spans than at the start of the run can be read."""
    ids: Ids = ()
    """(rollout, attempt) ids that its spans must have; empty: any."""
    grpc: str = ""
    clickhouse: str = ""
    """URL of ClickHouse's HTTP protocol."""


@contextlib.asynccontextmanager
async def ours(folder: Path) -> AsyncGenerator[Peer]:
    """Run a queue and a collector with the embedded ClickHouse; spans are fsynced before the acknowledgement."""
    async with services(folder / "ours", "queue", "collector") as made:
        grpc, address = f"127.0.0.1:{made.settings.otlp_grpc_port}", Address(f"{made.otlp}/v1/traces")
        pids = [made.pids["collector"]]
        yield Peer("our collector, embedded ClickHouse", address, pids, lambda _: made.barrier(), grpc=grpc, clickhouse=made.clickhouse)


@contextlib.asynccontextmanager
async def agentlightning(_: Path, rollouts: int = 1360) -> AsyncGenerator[Peer]:
    """Run Agent Lightning 0.3's store, in memory; acknowledged spans are visible at once."""
    port = free_port()
    command = [str(installed("agentlightning-0.3.0", AGENTLIGHTNING) / "bin" / "agl"), "store", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"

    async def at_once(_: int) -> None:
        return

    async with process([*command, "--host", "127.0.0.1", "--log-level", "ERROR"], os.environ, port) as pid:
        ids: list[tuple[str, str]] = []
        async with aiohttp.ClientSession() as session:
            while len(ids) < rollouts:
                for path, body in (("enqueue", {"rollouts": [{"input": {}}] * 100}), ("dequeue", {"limit": 100, "worker_id": "bench"})):
                    async with session.post(f"{url}/v1/agl/queues/rollouts/{path}", json=body) as response:
                        response.raise_for_status()
                        answer = await response.json()
                ids += [(each["rollout_id"], each["attempt"]["attempt_id"]) for each in answer]
        yield Peer("Agent Lightning 0.3's store (in memory)", Address(f"{url}/v1/traces"), [pid], at_once, ids)


def agentlightning_python() -> str:
    """Return an interpreter that has Agent Lightning 0.3. Raises AbsentError if it cannot be installed."""
    return str(installed("agentlightning-0.3.0", AGENTLIGHTNING) / "bin" / "python")


@contextlib.asynccontextmanager
async def rotel(folder: Path) -> AsyncGenerator[Peer]:
    """Run rotel into the default table of a ClickHouse server; it acknowledges spans before they are stored."""
    binary = next(installed("rotel", ROTEL).glob("lib/python*/site-packages/rotel/rotel-agent"))
    port, grpc = free_port(), free_port()
    async with _server(folder / "rotel") as (server, engine):
        engine.command("CREATE DATABASE IF NOT EXISTS otel")
        engine.command(DEFAULT_TABLE)
        command = [str(binary), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
        command += ["--exporter", "clickhouse", "--clickhouse-exporter-endpoint", f"http://127.0.0.1:{server.http_port}"]
        command += ["--clickhouse-exporter-user", "default", "--clickhouse-exporter-async-insert", "false"]
        async with process(command, os.environ, port) as pid:
            address = Address(f"http://127.0.0.1:{port}/v1/traces")
            yield Peer("rotel to ClickHouse (acks before it stores)", address, [pid, _pid(server)], _counted(engine))


@contextlib.asynccontextmanager
async def otelcol(folder: Path) -> AsyncGenerator[Peer]:
    """Run our build of the OpenTelemetry Collector with wait_for_result, into our tables of a ClickHouse server."""
    binary = os.environ.get("AGL_OTELCOL") or str(ROOT / "build" / "otelcol" / "agl-otelcol")
    if shutil.which(binary) is None:
        raise AbsentError(f"{binary} is not built: make otelcol (needs Go)")
    names = ("AGL_OTLP_GRPC_PORT", "AGL_OTLP_HTTP_PORT", "AGL_OTELCOL_HEALTH_PORT", "AGL_OTELCOL_METRICS_PORT")
    ports = {name: free_port() for name in names}
    queue_port = free_port()
    data = {**os.environ, "AGL_QUEUE_PORT": str(queue_port), "AGL_DATA_DIR": str(folder / "otelcol"), "AGL_LOG_LEVEL": "ERROR"}
    async with _server(folder / "otelcol-ch") as (server, engine):
        create_schema(engine, where="the bench's server")
        environment = data | {name: str(port) for name, port in ports.items()} | {"AGL_HOST": "127.0.0.1"}
        environment |= {"AGL_STORE": f"127.0.0.1:{queue_port}", "AGL_OTELCOL_CLICKHOUSE": f"clickhouse://127.0.0.1:{server.tcp_port}"}
        command = [binary, "--config", str(ROOT / "deploy" / "otelcol" / "gateway.yaml")]
        async with (
            process([sys.executable, "-m", "agl_otel.queue"], data, queue_port),
            process(command, environment, ports["AGL_OTLP_HTTP_PORT"]) as pid,
        ):
            address = Address(f"http://127.0.0.1:{ports['AGL_OTLP_HTTP_PORT']}/v1/traces")
            yield Peer("our otelcol build, wait_for_result", address, [pid, _pid(server)], _counted(engine))


@contextlib.asynccontextmanager
async def _server(folder: Path) -> AsyncGenerator[tuple[ClickHouseServer, ServerEngine]]:
    try:
        server = ClickHouseServer(folder)
    except pytest.skip.Exception as reason:
        raise AbsentError(str(reason)) from None
    await asyncio.to_thread(server.start)
    engine = ServerEngine(ServerAddress.parse(server.url()))
    try:
        yield server, engine
    finally:
        engine.close()
        server.kill()


def _pid(server: ClickHouseServer) -> int:
    return server._process.pid if server._process else 0  # pyright: ignore[reportPrivateUsage] - the pid is needed to measure its CPU


def _counted(engine: ServerEngine) -> Callable[[int], Awaitable[None]]:
    async def visible(spans: int) -> None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while (found := int(str((await asyncio.to_thread(engine.select, "SELECT count() FROM otel.otel_traces"))[0][0]))) < spans:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{found} of {spans} acked spans are stored after {VISIBLE_SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    return visible
