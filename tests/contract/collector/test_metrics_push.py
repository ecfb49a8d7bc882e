"""Every service pushes its own metrics by OTLP to a real collector, which stores them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from agl_otel.settings import free_port
from tests.contract.collector.stack import Stack, new_stack, start, until

pytestmark = pytest.mark.full
NAMED = {  # a metric of each service
    "agl-otel-queue": "agl.store.latency",
    "agl-otel-collector": "agl.collector.received",
    "agl-otel-web": "agl.claimable",
    "agl-otel-proxy": "agl.proxy.under_way",
    "agl-otel-runner": "agl.runner.running",
}
ROWS = """
SELECT DISTINCT ServiceName, MetricName FROM (
  SELECT ServiceName, MetricName FROM otel.otel_metrics_sum UNION ALL SELECT ServiceName, MetricName FROM otel.otel_metrics_gauge
  UNION ALL SELECT ServiceName, MetricName FROM otel.otel_metrics_histogram)
"""
MOST = "SELECT max(Count) AS most FROM otel.otel_metrics_histogram WHERE MetricName = 'agl.store.latency'"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    made = new_stack(tmp_path)
    yield made
    for service in reversed(list(made.processes)):
        assert await made.end(service) == 0, made.log.read_text()


async def test_metrics_of_every_service_are_stored_by_the_collector(stack: Stack) -> None:
    token = SecretStr("a-token-of-the-stack")
    headers = SecretStr(f"authorization=Bearer%20{token.get_secret_value()}")
    push = {"metrics_otlp": stack.grpc, "metrics_otlp_headers": headers, "metrics_otlp_seconds": 0.2}
    stack.settings = stack.settings.model_copy(update={"token": token, **push})
    await start(stack)
    for service in ("web", "proxy"):
        stack.spawn(service)
    stack.spawn("runner", "-m", "agl_otel.runner", "--", "true")
    async with stack.reader() as reader:

        async def pushed_names() -> set[tuple[str, str]]:
            await reader.barrier()
            return {(row["ServiceName"], row["MetricName"]) for row in await reader.query(ROWS)}

        async def most() -> int:
            await reader.barrier()
            return (await reader.query(MOST))[0]["most"]

        await until(pushed_names, lambda found: found >= set(NAMED.items()))
        before = await most()
        await until(most, lambda count: count > before)


async def test_an_unavailable_endpoint_is_logged_once_and_does_no_harm(stack: Stack) -> None:
    push = {"metrics_otlp": f"127.0.0.1:{free_port()}", "metrics_otlp_seconds": 0.05}
    stack.settings = stack.settings.model_copy(update=push)
    await start(stack)

    async def complaints() -> int:
        return stack.log.read_text().count("metrics are not pushed to 127.0.0.1")

    await until(complaints, lambda count: count == 2)  # the queue's and the collector's
    for service in ("collector", "queue"):
        assert await stack.end(service) == 0  # the last push fails, too
    assert await complaints() == 2
