"""A proxy in the test's process between a real model server and a real OTLP receiver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from tests.contract.proxy.stand import Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


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
