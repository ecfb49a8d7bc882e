"""A proxy in the test's process between a real model server and a real OTLP receiver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from tests.contract.proxy.processes import start, stop
from tests.contract.proxy.stand import Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    server = ModelServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def stand(receiver: OtlpReceiver, model: ModelServer) -> AsyncIterator[Stand]:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "served-model", "real-key", {"temperature": 0.25}, "3"))) as stand:
        yield stand


@pytest.fixture
def settings(receiver: OtlpReceiver, tmp_path: Path) -> Settings:
    otlp_port = int(receiver.grpc_address.rpartition(":")[2])
    return Settings(
        data_dir=tmp_path, queue_port=0, proxy_port=0, otlp_http_port=0, clickhouse_port=0, web_port=0, otlp_grpc_port=otlp_port
    ).with_ports()


@pytest.fixture
async def queue(settings: Settings) -> AsyncIterator[QueueClient]:
    process = await start("agl_otel.queue", settings)
    async with QueueClient(f"{settings.host}:{settings.queue_port}", retry_seconds=300) as client:
        await client.describe()
        yield client
    await stop(process)
