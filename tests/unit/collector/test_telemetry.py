"""The collector's own metrics, as JSON and in Prometheus' text format."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from agl_otel.collector.telemetry import Telemetry, quantile
from agl_otel.errors import UnavailableError
from agl_otel.service.logs import JsonFormatter


def test_counters_are_read_on_demand() -> None:
    telemetry = Telemetry()
    numbers = {"a": 1}
    telemetry.count("things", "{thing}", "things", lambda: [(n, {"kind": kind}) for kind, n in numbers.items()])
    numbers |= {"a": 5, "b": 2}
    telemetry.batch_stored(1000, 3.0, 0.5)
    telemetry.batch_stored(2000, 3.0, 0.5)
    found = telemetry.snapshot()
    assert found["agl.collector.things"] == [{"attributes": {"kind": "a"}, "value": 5}, {"attributes": {"kind": "b"}, "value": 2}]
    (visible,) = found["agl.collector.visible.duration"]
    assert (visible["count"], visible["sum"], visible["p50"], visible["p99"]) == (2, 4.0, 2.0, 5.0)
    telemetry.close()


def test_prometheus_text_or_a_clear_error_if_the_library_is_missing() -> None:
    telemetry = Telemetry()
    telemetry.count("things", "{thing}", "things", lambda: [(3, {})])
    try:
        body, content_type = telemetry.prometheus()
    except UnavailableError as error:
        assert "opentelemetry-exporter-prometheus" in str(error)
    else:
        assert b"\nagl_collector_things_total 3.0\n" in body
        assert content_type.startswith("text/plain")
    telemetry.close()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [([0, 0, 0], 0.5, None), ([10, 0, 0], 0.5, 1.0), ([1, 1, 0], 0.99, 2.0), ([0, 0, 1], 0.5, 2.0)],
)
def test_a_quantile_is_the_bound_of_its_bucket(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile(counts, [1.0, 2.0], share) == expected


def test_a_json_log_line_holds_message_extra_and_exception() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.getLogger("a.b").makeRecord(
            "a.b", logging.ERROR, "f", 1, "said %d", (3,), sys.exc_info(), extra={"rollout": "ro-1"}
        )
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"], line["rollout"]) == ("ERROR", "a.b", "said 3", "ro-1")
    assert line["time"].endswith("+00:00")
    assert "ValueError: broken" in line["exception"]
