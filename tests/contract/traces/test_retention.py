"""Rows are kept by the day they were received, on both engines."""

from __future__ import annotations

import pytest

from agl_otel.traces.opened import TraceStore
from agl_otel.traces.retention import apply_retention
from agl_otel.traces.schema import create_schema


def insert(engine: TraceStore, age_days: int) -> None:
    engine.command(f"INSERT INTO otel.otel_traces (SpanId, ReceivedAt) SELECT '{age_days} days', now() - INTERVAL {age_days} DAY")


def kept(engine: TraceStore) -> list[object]:
    engine.command("OPTIMIZE TABLE otel.otel_traces FINAL")
    return [row[0] for row in engine.select("SELECT SpanId FROM otel.otel_traces ORDER BY ReceivedAt DESC")]


def test_rows_expire_by_their_day_of_receipt(engine: TraceStore) -> None:
    assert apply_retention(engine, 0) == []
    altered = apply_retention(engine, 30)
    assert {"otel_traces", "otel_logs", "otel_metrics_sum", "otel_traces_trace_id_ts"} <= set(altered)
    for age in (1, 100):
        insert(engine, age)
    assert kept(engine) == ["1 days"]


def test_the_setting_is_applied_once_and_can_be_reverted(engine: TraceStore) -> None:
    apply_retention(engine, 30)
    assert apply_retention(engine, 30) == []
    assert "otel_traces" in apply_retention(engine, 365)
    assert "otel_traces" in apply_retention(engine, 0)
    insert(engine, 100)
    assert kept(engine) == ["100 days"]


@pytest.mark.parametrize("days", [0, 7])
def test_creating_the_schema_again_leaves_the_retention(engine: TraceStore, days: int) -> None:
    apply_retention(engine, days)
    assert not create_schema(engine, where="again")
    assert apply_retention(engine, days) == []
