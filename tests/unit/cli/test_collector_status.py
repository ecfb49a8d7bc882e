"""What `agl-otel collector status` prints of a collector is what its /health says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agl_otel.cli.collector import print_status, trouble_of

FULL_LOG = "the write-ahead log holds 4096 MiB, all of its budget (AGL_WAL_BUDGET_BYTES), because ClickHouse does not keep up"
AWAY = "ClickHouse at clickhouse://u@h:9000/otel does not answer at http://h:8123/ping"


def found(**other: Any) -> dict[str, Any]:
    fine = {"address": "http://c:1", "status": "ok", "uptime_seconds": 1.0, "core": "compiled", "metrics": {}}
    return {**fine, "disk": {"level": "ok", "message": ""}, "store_problems": [], **other}


def shown(status: dict[str, Any]) -> str:
    console = Console(width=300, file=io.StringIO(), force_terminal=False)
    print_status(console, status)
    return " ".join(console.file.getvalue().split())  # pyright: ignore[reportAttributeAccessIssue] - a StringIO


def test_a_healthy_collector_is_ok() -> None:
    assert trouble_of(found()) == ""
    assert "http://c:1: ok, up 1 s, compiled core" in shown(found())


@pytest.mark.parametrize("status", [
    found(status="degraded", reason=AWAY),
    found(status="degraded", reason=FULL_LOG, disk={"level": "full", "message": FULL_LOG}),
    found(status="degraded", reason=f"{AWAY}; a part is damaged", store_problems=["a part is damaged"]),
], ids=["ClickHouse is away", "the log is full", "a damaged part"])  # fmt: skip
def test_a_degraded_one_is_named_so_with_its_reason_once(status: dict[str, Any]) -> None:
    text = shown(status)
    assert trouble_of(status) == status["reason"]
    assert "http://c:1: degraded" in text and text.count(status["reason"]) == 1 and "disk full" not in text


def test_a_warning_is_shown_and_is_no_trouble() -> None:
    status = found(disk={"level": "warning", "message": "only 900 MiB are free"})
    assert trouble_of(status) == "" and "only 900 MiB are free" in shown(status)


def test_the_status_of_an_earlier_release_is_read_as_well() -> None:
    earlier = found(disk={"level": "full", "message": FULL_LOG})
    del earlier["status"]
    assert trouble_of(earlier) == FULL_LOG
