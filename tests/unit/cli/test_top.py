"""The screen of `agl-otel top` and its rates between two readings."""

from __future__ import annotations

import dataclasses
import io
import time
from typing import Any

from rich.console import Console

from agl_otel.cli.top import Reading, rate, screen
from agl_otel.types import Rollout, Worker


def reading(at: float, *, finished: int = 0, spans: int = 0, **other: Any) -> Reading:
    statistics = {
        "rollouts_by_status": {"running": 2, "succeeded": finished},
        "total_rollouts": finished + 2,
        "total_attempts": finished + 2,
        "total_workers": 1,
        "claimable": 3,
        "oldest_claimable_age_seconds": 7.0,
        "uptime": 60.0,
        "name": "sqlite",
    }
    metrics = {"agl.collector.accepted": [{"attributes": {"signal": "traces"}, "value": spans}]}
    collectors = [{"address": "http://c:1", "disk": {"level": "ok", "message": ""}, "metrics": metrics}]
    return Reading(
        at, statistics, other.get("workers", []), other.get("ended", []), other.get("collectors", collectors), other.get("down", {})
    )


def shown(now: Reading, before: Reading | None) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(screen(now, before))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue] - a StringIO


def test_rates_are_increases_between_two_readings() -> None:
    before, now = reading(10.0, finished=5, spans=100), reading(12.0, finished=9, spans=300)
    assert (rate(now, before, "finished"), rate(now, before, "accepted")) == (2.0, 100.0)
    assert rate(now, None, "finished") is None
    text = shown(now, before)
    assert "finished 2.0/s" in text and "spans 100.0/s" in text and "3 can be claimed, the first for 7 s" in text


def test_a_restarted_collector_has_no_rate() -> None:
    assert rate(reading(12.0, spans=3), reading(10.0, spans=100), "accepted") is None
    assert "spans -" in shown(reading(12.0, spans=3), reading(10.0, spans=100))


def test_agents_and_workers_cannot_control_the_terminal() -> None:
    worker = Worker(worker_id="w\x1b[2J", status="busy", heartbeat_stats={"running": 1, "concurrency": 8, "cpu_usage_pct": "\x1b]0;x\x07"})
    ended = Rollout(rollout_id="ro-1", input="\x1b[31mred[bold]", start_time=0.0, end_time=1.0, status="failed")
    text = shown(reading(1.0, workers=[worker], ended=[ended]), None)
    assert "\x1b" not in text and "1 of 8" in text and "red[bold]" in text


def test_workers_that_are_not_heard_of_any_more_are_counted_and_not_listed() -> None:
    ended, beats = (Worker(worker_id=name, status="busy", last_heartbeat_time=time.time() - age) for name, age in (("w-1", 90), ("w-2", 5)))
    now = reading(1.0, workers=[beats, ended])
    now = dataclasses.replace(now, statistics={**now.statistics, "total_workers": 20})
    text = shown(now, None)
    assert "workers (20, 19 of them gone: `agl-otel workers ls`)" in text and "w-2" in text and "w-1" not in text
    assert "workers (1)" in shown(reading(1.0, workers=[beats]), None)


def test_an_unresponsive_collector_is_named() -> None:
    text = shown(reading(1.0, collectors=[{"address": "http://gone:1", "error": "refused"}]), None)
    assert "collector http://gone:1: refused" in text


def test_a_service_that_is_down_is_named_with_the_reason() -> None:
    text = shown(reading(1.0, down={"proxy": "ended with code 1 (killed\x1b[2J), starts again in 4 s"}), None)
    assert "proxy ended with code 1" in text and "starts again in 4 s" in text and "\x1b" not in text
    assert "proxy" not in shown(reading(1.0), None)


def test_a_degraded_collector_says_why() -> None:
    (collector,) = reading(10.0).collectors
    away = {**collector, "status": "degraded", "reason": "ClickHouse at clickhouse://u@h:9000/otel does not answer"}
    text = shown(reading(10.0, collectors=[away]), None)
    assert "degraded: ClickHouse at clickhouse://u@h:9000/otel does not answer" in text
    assert "0.0 MiB, ok" in shown(reading(10.0), None)
