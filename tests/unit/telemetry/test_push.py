from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from agl_otel.errors import SettingsError
from agl_otel.settings import Settings
from agl_otel.telemetry.meters import Durations, Family
from agl_otel.telemetry.push import Pushed, pushing


async def test_families_become_metrics_of_otlp() -> None:
    counted = Family("agl.store.total", "counter", "Calls.", [({"method": "claim"}, 3.0)])
    now = Family("agl.claims", "gauge", "Now.", [({}, 2.0)])
    took = Family("agl.store.latency", "histogram", "Seconds.", durations=[({"method": "claim"}, Durations([0.1, 1.0], [4, 0, 1], 60.5))])

    async def families() -> list[Family]:
        return [counted, now, took]

    times = iter((7, 9))
    request = encode_metrics(await Pushed("queue", families, clock=lambda: next(times)).data())
    (resource_metrics,) = request.resource_metrics
    assert {each.key: each.value.string_value for each in resource_metrics.resource.attributes}["service.name"] == "agl-otel-queue"
    calls, claims, latency = resource_metrics.scope_metrics[0].metrics
    (point,) = calls.sum.data_points
    assert (calls.name, calls.sum.is_monotonic, point.as_double, point.attributes[0].value.string_value) == (
        "agl.store.total",
        True,
        3.0,
        "claim",
    )
    assert (point.start_time_unix_nano, point.time_unix_nano) == (7, 9)
    assert [each.as_double for each in claims.gauge.data_points] == [2.0]
    (bucketed,) = latency.histogram.data_points
    assert (latency.unit, bucketed.count, bucketed.sum) == ("s", 5, 60.5)
    assert (list(bucketed.explicit_bounds), list(bucketed.bucket_counts)) == ([0.1, 1.0], [4, 0, 1])
    assert not bucketed.HasField("min") and not bucketed.HasField("max")


@pytest.mark.parametrize("wrong", ["nowhere", "http://host/v1/metrics", "host:port"])
async def test_an_endpoint_without_a_port_is_named(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"AGL_METRICS_OTLP .*HOST:4317"):
        async with pushing(Pushed("queue", lambda: None).data, Settings(metrics_otlp=wrong)):  # pyright: ignore[reportArgumentType]
            pass


async def test_an_invalid_header_is_named_without_its_value() -> None:
    settings = Settings(metrics_otlp="host:4317", metrics_otlp_headers="secret")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingsError, match="AGL_METRICS_OTLP_HEADERS: entry 1") as refused:
        async with pushing(Pushed("queue", lambda: None).data, settings):  # pyright: ignore[reportArgumentType]
            pass
    assert "secret" not in str(refused.value)


EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


class Endpoint:
    """An endpoint of OTLP over gRPC that accepts or refuses metrics."""

    def __init__(self) -> None:
        self.port = 0
        self.came: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.refuses = False

    async def export(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.came.put_nowait(dict(context.invocation_metadata() or ()))
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        return b""


@asynccontextmanager
async def endpoint() -> AsyncGenerator[Endpoint]:
    made, server = Endpoint(), grpc.aio.server()
    made.port = server.add_insecure_port("127.0.0.1:0")
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(made.export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT.split("/")[1], handlers),))
    await server.start()
    try:
        yield made
    finally:
        await server.stop(0)


async def one() -> list[Family]:
    return [Family("agl.claims", "gauge", "Now.", [({}, 2.0)])]


async def test_a_stopping_service_pushes_once_more_without_the_users_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-vendor-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-vendor-key=secret")
    async with endpoint() as there:
        for given in ("", "x-own=1"):
            settings = Settings.load(metrics_otlp=f"127.0.0.1:{there.port}", metrics_otlp_headers=given, metrics_otlp_seconds=3600)
            async with pushing(Pushed("queue", one).data, settings):
                assert there.came.empty()
            shown = there.came.get_nowait()
            assert "x-vendor-key" not in shown and shown.get("x-own", "") == given.removeprefix("x-own=")


async def test_trouble_and_its_end_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint() as there:
        there.refuses = True
        settings = Settings.load(metrics_otlp=f"127.0.0.1:{there.port}", metrics_otlp_seconds=0.01)
        async with pushing(Pushed("queue", one).data, settings):
            for refuses in (True, True, True, False, False, False):
                await there.came.get()
                there.refuses = refuses
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert (
            len(warnings) == 2 and "who are you?" in warnings[0] and "AGL_METRICS_OTLP" in warnings[0] and warnings[1].endswith("again")
        ), warnings
