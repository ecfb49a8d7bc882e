"""Every panel's query of deploy/grafana returns rows, on both engines, through the read-only endpoint that Grafana asks."""

from __future__ import annotations

import json
import re
import runpy
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from agl_otel.collector.metrics import identify_points, metric_rows
from agl_otel.store.figures import figures_request
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel_hook import conventions

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
GENERATED: Final = runpy.run_path(str(DEPLOY / "grafana" / "generate.py"))
DASHBOARDS: Final = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))}
NOW: Final = "2026-01-02 03:04:05"
CHOSEN: Final = {"metric": "reward_mean", "rollout": "ro-1"}
TARGETS: Final = [
    pytest.param(panel["targets"][0], id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
]


def asked(sql: str) -> str:
    """What the plugin sends for a query: macros and variables filled in."""
    sql = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 >= toDateTime('{NOW}') - 3600 AND \1 <= toDateTime('{NOW}') + 3600", sql)
    sql = re.sub(r"\$__timeInterval\((\w+)\)", r"toStartOfInterval(toDateTime(\1), INTERVAL 60 second)", sql)
    sql = sql.replace("$__interval_s", "60")
    return re.sub(r"\$\{(\w+)\}", lambda found: CHOSEN[found[1]], sql)


def span(number: int, name: str, attributes: dict[str, str], **other: Any) -> dict[str, Any]:
    return {
        "Timestamp": f"{NOW}.{number:09d}",
        "ReceivedAt": f"{NOW}.500",
        "Duration": 1_000_000,
        "TraceId": "t",
        "SpanId": f"s{number}",
        "ParentSpanId": "",
        "ServiceName": "agent",
        "SpanName": name,
        "StatusCode": "Unset",
        "SpanAttributes": attributes,
        "ResourceAttributes": {"service.name": "agent"},
        "RolloutId": "ro-1",
        "AttemptId": "at-1",
        "SequenceId": number,
        **other,
    }


def put(engine: TraceStore, table: str, rows: list[dict[str, Any]]) -> None:
    engine.insert(f"otel.{table}", [*rows[0]], ["\n".join(json.dumps(row) for row in rows).encode()])


@pytest.fixture
def filled(engine: TraceStore) -> TraceStore:
    """A rollout with a call, a reward, an error and a line of output; a step that was trained on it."""
    process = {conventions.PROCESS: "p"}
    step = {
        conventions.TRAIN_RUN: "grpo-1",
        conventions.TRAIN_ALGORITHM: "grpo",
        conventions.TRAIN_STEP_NUMBER: "1",
        conventions.TRAIN_VERSION_AFTER: "1",
        conventions.TRAIN_ATTEMPTS: "1",
        conventions.TRAIN_SAMPLES: "1",
        conventions.TRAIN_REFUSED: "0",
        f"{conventions.TRAIN_METRIC}.reward_mean": "0.5",
        f"{conventions.TRAIN_METRIC}.loss": "0.1",
    }
    call = {**process, conventions.LLM_CALL: "1", conventions.LLM_MODEL_VERSION: "1", "gen_ai.usage.input_tokens": "3"}
    put(
        engine,
        "otel_traces",
        [
            span(1, conventions.SPAN_ATTEMPT, {}),
            span(2, conventions.SPAN_LLM, call, ParentSpanId="s1"),
            span(3, conventions.SPAN_REWARD, {**process, conventions.reward_value_key(0): "0.5"}, ParentSpanId="s1"),
            span(4, "tool", process, StatusCode="Error", ParentSpanId="s1"),
            span(6, conventions.SPAN_SEAL, {**process, conventions.SEAL_SPANS: "3"}, ParentSpanId="s1"),
            span(7, "tool", {conventions.PROCESS: "q"}, ParentSpanId="s1", RolloutId="ro-2", AttemptId="at-2"),
            span(8, conventions.SPAN_REWARD, {conventions.reward_value_key(0): "nan"}, RolloutId="ro-2", AttemptId="at-2"),
            span(5, conventions.SPAN_TRAIN_STEP, step, TraceId="run", RolloutId="", AttemptId="", SequenceId=0),
        ],
    )
    record = {
        "Timestamp": f"{NOW}.1",
        "SeverityText": "INFO",
        "Body": "hello",
        "ServiceName": "agent",
        "RolloutId": "ro-1",
        "AttemptId": "at-1",
    }
    put(engine, "otel_logs", [record])
    moment = int(datetime.fromisoformat(f"{NOW}+00:00").timestamp())
    figures = figures_request({"stale_share": 0.25, "logprob_drift": 1e-4}, "grpo", moment * 10**9)
    found = identify_points(figures, now_unix_nano=moment * 10**9)
    for kind, rows in metric_rows(figures.SerializeToString(), found, received_ms=moment * 1000, batch=1, first={}).items():
        put(engine, f"otel_metrics_{kind}", [json.loads(row) for row in rows])  # as the collector writes them
    return engine


def test_the_files_equal_the_generated_panels() -> None:
    assert {f"{name}.json": dashboard for name, dashboard in DASHBOARDS.items()} == {
        name: json.loads(text) for name, text in GENERATED["texts"]().items()
    }


async def test_every_panel_and_variable_of_clickhouse_returns_rows(filled: TraceStore, reader: TraceReader) -> None:
    assert len(TARGETS) >= 20
    for param in TARGETS:
        [target] = param.values
        assert isinstance(target, dict)
        if "rawSql" in target:
            assert await reader.query(asked(target["rawSql"])), f"{param.id} returns nothing"
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                values = [next(iter(row.values())) for row in await reader.query(asked(variable["query"]))]
                assert values[0] == CHOSEN[variable["name"]], f"{variable['name']} of {name}"


async def test_verdicts_and_staleness_equal_the_stored_ones(filled: TraceStore, reader: TraceReader) -> None:
    queries = {param.id: param.values[0]["rawSql"] for param in TARGETS if "rawSql" in param.values[0]}  # type: ignore[index]
    verdicts = await reader.query(asked(queries["training: Verdicts by their seals"]))
    assert {(row["verdict"], row["attempts"]) for row in verdicts} == {("complete", 1.0), ("incomplete", 1.0)}
    figures = await reader.query(asked(queries["training: Staleness and drift"]))
    assert {(row["figure"], row["value"]) for row in figures} == {("stale_share", 0.25), ("logprob_drift", 1e-4)}


async def test_rewards_that_are_not_usable_are_in_no_mean(filled: TraceStore, reader: TraceReader) -> None:
    sql = next(param.values[0]["rawSql"] for param in TARGETS if param.id == "training: Rewards of attempts")  # type: ignore[index]
    (row,) = await reader.query(asked(sql))
    assert (row["mean"], row["p10"], row["p90"]) == (0.5, 0.5, 0.5)


async def test_the_columns_that_hyperdx_selects_exist(filled: TraceStore, reader: TraceReader) -> None:
    for source in json.loads((DEPLOY / "hyperdx" / "sources.json").read_text()):
        expressions = [value for key, value in source.items() if key.endswith("Expression")]
        [row, *_] = await reader.query(f"SELECT {', '.join(expressions)} FROM {source['from']['tableName']} LIMIT 1")
        assert row
