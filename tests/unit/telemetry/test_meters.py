from __future__ import annotations

from agl_otel.telemetry.exposition import merged
from agl_otel.telemetry.meters import BOUNDS_SECONDS, Meters


def test_counts_and_durations_are_written_in_prometheus_format() -> None:
    meters = Meters()
    count = meters.counter("agl.store.total", "Calls.", "method", "status")
    took = meters.durations("agl.store.latency", "Seconds.", "method")
    meters.gauge("agl.claims", "Now.", lambda: [({}, 3)])
    count("claim", "OK")
    count("claim", "OK")
    count('odd"name', "NOT_FOUND")
    took(0.0015, "claim")
    took(1e9, "claim")
    lines = meters.text().splitlines()
    assert lines[:4] == [
        "# HELP agl_store_total Calls.",
        "# TYPE agl_store_total counter",
        'agl_store_total{method="claim",status="OK"} 2.0',
        'agl_store_total{method="odd\\"name",status="NOT_FOUND"} 1.0',
    ]
    buckets = [line for line in lines if line.startswith("agl_store_latency_bucket")]
    assert len(buckets) == len(BOUNDS_SECONDS) + 1
    assert 'agl_store_latency_bucket{le="0.001",method="claim"} 0.0' in buckets
    assert 'agl_store_latency_bucket{le="0.002",method="claim"} 1.0' in buckets
    assert 'agl_store_latency_bucket{le="+Inf",method="claim"} 2.0' in buckets
    assert lines[-2:] == ["# TYPE agl_claims gauge", "agl_claims 3.0"] and 'agl_store_latency_count{method="claim"} 2.0' in lines


def test_the_bounds_grow_from_a_microsecond_to_five_minutes() -> None:
    assert list(BOUNDS_SECONDS) == sorted(set(BOUNDS_SECONDS)) and (BOUNDS_SECONDS[0], BOUNDS_SECONDS[-1]) == (1e-6, 300.0)


def test_pages_of_several_services_are_merged_with_a_label() -> None:
    page = '# HELP rows_total Rows.\n# TYPE rows_total counter\nrows_total{signal="a b"} 1.0\n# TYPE level gauge\nlevel 0.0\n'
    assert merged({"a:1": page, "b:2": page}, "collector").splitlines() == [
        "# HELP rows_total Rows.",
        "# TYPE rows_total counter",
        'rows_total{collector="a:1",signal="a b"} 1.0',
        'rows_total{collector="b:2",signal="a b"} 1.0',
        "# HELP level ",
        "# TYPE level gauge",
        'level{collector="a:1"} 0.0',
        'level{collector="b:2"} 0.0',
    ]
