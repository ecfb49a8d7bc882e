from __future__ import annotations

import pytest

from agl_otel.errors import SettingsError
from agl_otel.settings import Settings
from agl_otel.telemetry.exposition import Durations, Family
from agl_otel.telemetry.push import Pushed, pushing


async def test_families_become_metrics_of_otlp() -> None:
    counted = Family("agl.store.total", "counter", "Calls.", [({"method": "claim"}, 3.0)])
    now = Family("agl.claims", "gauge", "Now.", [({}, 2.0)])
    took = Family("agl.store.latency", "histogram", "Seconds.", durations=[({"method": "claim"}, Durations([0.1, 1.0], [4, 0, 1], 60.5))])

    async def families() -> list[Family]:
        return [counted, now, took]

    times = iter((7, 9))
    request = await Pushed("queue", families, clock=lambda: next(times)).request()
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


@pytest.mark.parametrize("wrong", ["nowhere", "http://host/v1/metrics", "host:port"])
async def test_an_endpoint_without_a_port_is_named(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"AGL_METRICS_OTLP .*HOST:4317"):
        async with pushing(Pushed("queue", lambda: None).request, Settings(metrics_otlp=wrong)):  # pyright: ignore[reportArgumentType]
            pass


async def test_a_header_that_is_none_is_named_without_its_value() -> None:
    settings = Settings(metrics_otlp="host:4317", metrics_otlp_headers="secret")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingsError, match="AGL_METRICS_OTLP_HEADERS: entry 1") as refused:
        async with pushing(Pushed("queue", lambda: None).request, settings):  # pyright: ignore[reportArgumentType]
            pass
    assert "secret" not in str(refused.value)
