"""Writes the dashboards in dashboards/ from the panels below: `python deploy/grafana/generate.py`.

A panel is its SQL and how it is shown; everything else of Grafana's JSON is the same for all. Macros: $__timeFilter, $__timeInterval
(grafana-clickhouse-datasource). A test runs every query, on chdb and on a server, and compares the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from agl_otel.store.figures import PREFIX
from agl_otel_hook import conventions as s

FOLDER: Final = Path(__file__).parent / "dashboards"
CLICKHOUSE: Final = {"type": "grafana-clickhouse-datasource", "uid": "agl-otel"}
PROMETHEUS: Final = {"type": "prometheus", "uid": "agl-otel-metrics"}
FORMATS: Final = {"timeseries": 0, "table": 1, "stat": 1, "logs": 2, "traces": 3}
"""How the plugin reads the rows of a panel."""
METRIC: Final = s.TRAIN_METRIC + "."
_OWN: Final = f"RolloutId = '' AND NOT mapContains(SpanAttributes, '{s.INVALID}')"
STEPS: Final = f"otel_traces WHERE SpanName = '{s.SPAN_TRAIN_STEP}' AND {_OWN} AND $__timeFilter(Timestamp)"
RUN: Final = f"SpanAttributes['{s.TRAIN_RUN}']"
CALLS: Final = f"otel_traces WHERE SpanName = '{s.SPAN_LLM}' AND $__timeFilter(Timestamp)"
ONE: Final = "RolloutId = '${rollout}'"
REWARD_VALUE: Final = s.reward_value_key(0)
REWARDED: Final = "(SELECT {0} FROM otel_traces UNION ALL SELECT {0} FROM otel_logs)".format(
    "RolloutId, AttemptId, SequenceId, TraceId, SpanId, Timestamp, Rewards"
)
"""Spans and log records, which may be evaluations."""
PER_SECOND: Final = "greatest(1, $__interval_s)"


@dataclass(frozen=True)
class Panel:
    """One panel. `sql` is a query of ClickHouse, or with `prometheus` an expression of PromQL."""

    title: str
    kind: Literal["timeseries", "table", "stat", "logs", "traces"]
    sql: str
    about: str = ""
    unit: str = "short"
    width: int = 12
    """Of 24."""
    height: int = 8
    prometheus: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `variables` are {name: query of its values, or "" for a field to type into}."""

    uid: str
    title: str
    about: str
    panels: Sequence[Panel]
    variables: dict[str, str]
    since: str = "now-6h"


TRAINING: Final = Dashboard(
    "agl-otel-training",
    "Training overview",
    "Is it learning, on what, and what is refused?",
    [
        Panel(
            "${metric} by step",
            "timeseries",
            f"SELECT Timestamp AS time, {RUN} AS run, toFloat64OrNull(SpanAttributes['{METRIC}${{metric}}']) AS value\n"
            f"FROM {STEPS} AND mapContains(SpanAttributes, '{METRIC}${{metric}}') ORDER BY time",
            "One point for each training step; choose another figure above.",
        ),
        Panel(
            "Steps",
            "table",
            f"SELECT {RUN} AS run, SpanAttributes['{s.TRAIN_ALGORITHM}'] AS algorithm,\n"
            f"  toUInt32OrZero(SpanAttributes['{s.TRAIN_STEP_NUMBER}']) AS step, SpanAttributes['{s.TRAIN_VERSION_AFTER}'] AS made,\n"
            f"  toUInt32OrZero(SpanAttributes['{s.TRAIN_ATTEMPTS}']) AS attempts,\n"
            f"  toUInt32OrZero(SpanAttributes['{s.TRAIN_SAMPLES}']) AS samples,\n"
            f"  toUInt32OrZero(SpanAttributes['{s.TRAIN_REFUSED}']) AS refused, round(Duration / 1e9, 1) AS seconds, Timestamp AS time\n"
            f"FROM {STEPS} ORDER BY time DESC LIMIT 200",
            "What each step consumed and which version it made.",
        ),
        Panel(
            "Samples and refusals",
            "timeseries",
            f"SELECT Timestamp AS time, toFloat64OrZero(SpanAttributes['{s.TRAIN_SAMPLES}']) AS samples,\n"
            f"  toFloat64OrZero(SpanAttributes['{s.TRAIN_REFUSED}']) AS refused\nFROM {STEPS} ORDER BY time",
            "By step. Rising refusals bias what is learned: see the alarms of /metrics for why.",
        ),
        Panel(
            "Rewards of attempts",
            "timeseries",
            f"WITH toFloat64OrNull(Rewards['{REWARD_VALUE}']) AS reward\n"
            "SELECT $__timeInterval(Timestamp) AS time, avg(reward) AS mean, quantile(0.1)(reward) AS p10, quantile(0.9)(reward) AS p90\n"
            f"FROM {REWARDED} WHERE abs(reward) <= 1e9 AND $__timeFilter(Timestamp) GROUP BY time ORDER BY time",
            "Every usable reward that was emitted, train and val.",
        ),
        Panel(
            "Tokens sampled",
            "timeseries",
            f"SELECT $__timeInterval(Timestamp) AS time, sum(length(ResponseTokenIds)) / {PER_SECOND} AS response\n"
            f"FROM {CALLS} GROUP BY time ORDER BY time",
            "Tokens a second that the model wrote, by what the proxy captured.",
            unit="short",
        ),
        Panel(
            "Model calls",
            "timeseries",
            f"SELECT $__timeInterval(Timestamp) AS time, quantile(0.5)(Duration) / 1e9 AS p50, quantile(0.99)(Duration) / 1e9 AS p99\n"
            f"FROM {CALLS} GROUP BY time ORDER BY time",
            "Latency as the proxy saw it.",
            unit="s",
        ),
        Panel(
            "Versions of the weights in use",
            "timeseries",
            "SELECT $__timeInterval(Timestamp) AS time, "
            f"SpanAttributes['{s.LLM_MODEL_VERSION}'] AS version, toFloat64(count()) AS calls\n"
            f"FROM {CALLS} AND mapContains(SpanAttributes, '{s.LLM_MODEL_VERSION}') GROUP BY time, version ORDER BY time",
            "Model calls by the version that answered: an old one that stays is stale.",
            stacked=True,
        ),
        Panel(
            "Verdicts by their seals",
            "timeseries",
            "SELECT $__timeInterval(last) AS time,\n"
            "  multiIf(processes = 0, 'unproven', wrong = 0, 'complete', 'incomplete') AS verdict, toFloat64(count()) AS attempts\n"
            "FROM (SELECT AttemptId, max(seen) AS last, countIf(process != '') AS processes,\n"
            "    countIf(process != '' AND (sealed = 0 OR stored != spans OR dropped > 0)) AS wrong\n"
            f"  FROM (SELECT AttemptId, Facts['{s.PROCESS}'] AS process, max(ReceivedAt) AS seen,\n"
            f"      countIf(mapContains(Facts, '{s.SEAL_SPANS}')) AS sealed,\n"
            f"      countIf(SpanName NOT IN ('{s.SPAN_SEAL}', '{s.SPAN_ATTEMPT}')) AS stored,\n"
            f"      max(toUInt64OrZero(SpanAttributes['{s.SEAL_SPANS}'])) AS spans,\n"
            f"      max(toUInt64OrZero(SpanAttributes['{s.SEAL_DROPPED}'])) AS dropped\n"
            "    FROM otel_traces WHERE AttemptId != '' AND $__timeFilter(ReceivedAt) GROUP BY AttemptId, process)\n"
            "  GROUP BY AttemptId)\nGROUP BY time, verdict ORDER BY time, verdict",
            "Attempts by what their processes sealed; training also knows what runners reported. Running ones are incomplete.",
            stacked=True,
        ),
        Panel(
            "Staleness and drift",
            "timeseries",
            f"SELECT TimeUnix AS time, replaceOne(MetricName, '{PREFIX}', '') AS figure, Value AS value\n"
            f"FROM otel_metrics_gauge WHERE MetricName IN ('{PREFIX}stale_share', '{PREFIX}logprob_drift') AND $__timeFilter(TimeUnix)\n"
            "ORDER BY time",
            "As trainers record it: the share of samples of older weights, and how far log-probs of sampler and trainer lie apart.",
        ),
        Panel(
            "Verdicts that training gave",
            "timeseries",
            "sum by (verdict) (increase(agl_verdicts_total[$__rate_interval]))",
            "Of the latest attempts of rollouts that ended, as the web service judges them.",
            prometheus=True,
            stacked=True,
        ),
        Panel("Rollouts by status", "timeseries", "agl_rollouts", "As the queue counts them.", prometheus=True, stacked=True),
    ],
    {
        "metric": f"SELECT DISTINCT replaceOne(arrayJoin(arrayFilter(k -> startsWith(k, '{METRIC}'), mapKeys(SpanAttributes))), "
        f"'{METRIC}', '') AS metric FROM otel_traces WHERE SpanName = '{s.SPAN_TRAIN_STEP}' AND {_OWN} "
        "ORDER BY metric != 'reward_mean', metric",
    },
)
INGEST: Final = Dashboard(
    "agl-otel-ingest",
    "Ingest health",
    "Does everything arrive, in time, and with ids?",
    [
        Panel(
            "Spans a second",
            "timeseries",
            f"SELECT $__timeInterval(ReceivedAt) AS time, ServiceName AS service, count() / {PER_SECOND} AS spans\n"
            "FROM otel_traces WHERE $__timeFilter(ReceivedAt) GROUP BY time, service ORDER BY time",
            "As they were received, by service.",
            stacked=True,
        ),
        Panel(
            "From the end of a span to its receipt",
            "timeseries",
            "WITH toUnixTimestamp64Milli(ReceivedAt) - toUnixTimestamp64Nano(Timestamp + toIntervalNanosecond(Duration)) / 1e6 AS late\n"
            "SELECT $__timeInterval(ReceivedAt) AS time, quantile(0.5)(late) AS p50, quantile(0.99)(late) AS p99\n"
            "FROM otel_traces WHERE $__timeFilter(ReceivedAt) GROUP BY time ORDER BY time",
            "Exporters batch; what stands out waited in an exporter, or its machine's clock is off.",
            unit="ms",
        ),
        Panel(
            "Spans without a rollout",
            "timeseries",
            "SELECT $__timeInterval(ReceivedAt) AS time, countIf(RolloutId = '') AS without, countIf(RolloutId != '') AS identified\n"
            "FROM otel_traces WHERE $__timeFilter(ReceivedAt) GROUP BY time ORDER BY time",
            "They are kept, and get ids when their trace becomes known.",
        ),
        Panel(
            "Errors",
            "table",
            "SELECT ServiceName AS service, SpanName AS span, count() AS errors, any(StatusMessage) AS example\n"
            "FROM otel_traces WHERE StatusCode = 'Error' AND $__timeFilter(ReceivedAt)\n"
            "GROUP BY service, span ORDER BY errors DESC LIMIT 50",
            "Spans with status Error.",
        ),
        Panel(
            "Processes without a seal",
            "table",
            f"SELECT RolloutId AS rollout, AttemptId AS attempt, Facts['{s.PROCESS}'] AS process, count() AS spans,\n"
            "  max(ReceivedAt) AS last\n"
            f"FROM otel_traces WHERE RolloutId != '' AND mapContains(Facts, '{s.PROCESS}') AND $__timeFilter(ReceivedAt)\n"
            f"GROUP BY rollout, attempt, process HAVING countIf(mapContains(Facts, '{s.SEAL_SPANS}')) = 0 ORDER BY last DESC LIMIT 100",
            "They run still, or ended before they could say how many spans they had made: such an attempt is incomplete.",
        ),
        Panel(
            "Log records",
            "timeseries",
            "SELECT $__timeInterval(Timestamp) AS time, SeverityText AS severity, toFloat64(count()) AS records\n"
            "FROM otel_logs WHERE $__timeFilter(Timestamp) GROUP BY time, severity ORDER BY time",
            "With the captured output of agents.",
            stacked=True,
        ),
        Panel(
            "Acknowledged, not yet stored",
            "timeseries",
            "agl_collector_backlog",
            "Rows in the collector's log. They rise where ClickHouse is away or slow; nothing is lost.",
            prometheus=True,
        ),
        Panel(
            "The collector's log",
            "timeseries",
            "agl_collector_log_bytes",
            "How large it is; at agl_collector_log_budget_bytes nothing more is taken.",
            unit="bytes",
            prometheus=True,
        ),
    ],
    {},
    since="now-1h",
)
ROLLOUT: Final = Dashboard(
    "agl-otel-rollout",
    "One rollout",
    "What happened in it: attempts, model calls, rewards, output, trace.",
    [
        Panel(
            "Attempts",
            "table",
            "SELECT AttemptId AS attempt, Spans AS spans, Errors AS errors, PromptTokens AS prompt_tokens,\n"
            "  ResponseTokens AS response_tokens, FirstTime AS first, dateDiff('millisecond', FirstTime, LastTime) / 1000 AS seconds\n"
            f"FROM rollout_summary WHERE {ONE} ORDER BY first",
            width=24,
            height=5,
        ),
        Panel(
            "Model calls",
            "table",
            f"SELECT AttemptId AS attempt, SequenceId AS sequence, toUInt32OrZero(SpanAttributes['{s.LLM_CALL}']) AS call,\n"
            f"  SpanAttributes['{s.LLM_MODEL_VERSION}'] AS version, SpanAttributes['gen_ai.usage.input_tokens'] AS prompt_tokens,\n"
            "  length(ResponseTokenIds) AS response_tokens, round(arrayAvg(ResponseLogprobs), 3) AS mean_logprob,\n"
            "  round(Duration / 1e6) AS ms, StatusCode AS status, TraceId AS trace\n"
            f"FROM otel_traces WHERE {ONE} AND SpanName = '{s.SPAN_LLM}' ORDER BY attempt, sequence LIMIT 1 BY TraceId, SpanId",
            width=24,
        ),
        Panel(
            "Rewards",
            "table",
            f"SELECT AttemptId AS attempt, SequenceId AS sequence, toFloat64OrNull(Rewards['{REWARD_VALUE}']) AS reward,\n"
            "  Timestamp AS time\n"
            f"FROM {REWARDED} WHERE {ONE} AND mapContains(Rewards, '{REWARD_VALUE}') ORDER BY attempt, sequence, time\n"
            "LIMIT 1 BY TraceId, SpanId, time, Rewards",
        ),
        Panel(
            "Spans",
            "table",
            "SELECT SequenceId AS sequence, ServiceName AS service, SpanName AS span, round(Duration / 1e6, 1) AS ms,\n"
            f"  StatusCode AS status, AttemptId AS attempt, TraceId AS trace\n"
            f"FROM otel_traces WHERE {ONE} ORDER BY attempt, sequence, Timestamp\n"
            "LIMIT 1 BY TraceId, SpanId LIMIT 1000",
        ),
        Panel(
            "Trace",
            "traces",
            "SELECT TraceId AS traceID, SpanId AS spanID, ParentSpanId AS parentSpanID, ServiceName AS serviceName,\n"
            "  SpanName AS operationName, Timestamp AS startTime, Duration / 1e6 AS duration,\n"
            "  arrayMap(k -> map('key', k, 'value', SpanAttributes[k]), mapKeys(SpanAttributes)) AS tags,\n"
            "  arrayMap(k -> map('key', k, 'value', ResourceAttributes[k]), mapKeys(ResourceAttributes)) AS serviceTags\n"
            f"FROM otel_traces WHERE {ONE} AND TraceId =\n"
            f"  (SELECT TraceId FROM otel_traces WHERE {ONE} ORDER BY AttemptId DESC, SequenceId LIMIT 1)\n"
            "ORDER BY startTime LIMIT 1 BY SpanId LIMIT 5000",
            "Of the latest attempt.",
            width=24,
            height=14,
        ),
        Panel(
            "Output and logs",
            "logs",
            "SELECT Timestamp AS timestamp, Body AS body, lower(SeverityText) AS level, AttemptId AS attempt, ServiceName AS service\n"
            f"FROM otel_logs WHERE {ONE} ORDER BY timestamp LIMIT 1000",
            width=24,
            height=10,
        ),
    ],
    {"rollout": ""},
    since="now-30d",
)
DASHBOARDS: Final = (TRAINING, INGEST, ROLLOUT)


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """One panel, as Grafana keeps it."""
    source = PROMETHEUS if panel.prometheus else CLICKHOUSE
    target: dict[str, Any] = {"refId": "A", "datasource": source}
    if panel.prometheus:
        target |= {"expr": panel.sql}
    else:
        kind = panel.kind if panel.kind != "stat" else "table"
        target |= {"editorType": "sql", "queryType": kind, "format": FORMATS[panel.kind], "rawSql": panel.sql}
    drawn = {"fillOpacity": 15, "lineWidth": 1, "showPoints": "auto", **({"stacking": {"mode": "normal"}} if panel.stacked else {})}
    custom = {"custom": drawn} if panel.kind == "timeseries" else {}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, **custom}, "overrides": []},
        "options": {},
        "targets": [target],
    }


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """One dashboard, as Grafana's file provider reads it."""
    panels: list[dict[str, Any]] = []
    x = y = row = 0
    for number, panel in enumerate(dashboard.panels, start=1):
        if x + panel.width > 24:
            x, y, row = 0, y + row, 0
        panels.append(panel_json(panel, number, x, y))
        x, row = x + panel.width, max(row, panel.height)
    variables: list[dict[str, Any]] = [
        {"name": name, "label": name, "type": "query", "datasource": CLICKHOUSE, "query": query, "refresh": 2, "current": {}}
        if query
        else {"name": name, "label": name, "type": "textbox", "query": "", "current": {"text": "", "value": ""}}
        for name, query in dashboard.variables.items()
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["agl-otel"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": dashboard.since, "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def texts() -> dict[str, str]:
    """{file name: what belongs in it}."""
    return {f"{each.uid.removeprefix('agl-otel-')}.json": json.dumps(dashboard_json(each), indent=2) + "\n" for each in DASHBOARDS}


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
