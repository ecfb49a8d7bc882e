"""Find which rows of a request are stored, by the content of the rows instead of the batch id.

Used for requests whose batch is unknown (journal.py). A span row belongs to a request if it has the same time of receipt, in milliseconds,
and is the same span. Log records and data points have no ids, but a request's rows in one table are inserted all together or not at all, so
it suffices to look for the first one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector.decode import Accepted, log_rows
from agl_otel.collector.journal import Member, Request
from agl_otel.collector.metrics import TABLES, kinds_of, metric_rows
from agl_otel.traces.engine import DATABASE, Engine

SPANS_PER_QUERY: Final = 2_000  # limit on spans per query
_SPANS: Final = (
    f"SELECT TraceId, SpanId, toUnixTimestamp64Milli(ReceivedAt) FROM {DATABASE}.otel_traces WHERE SpanId IN {{spans:Array(String)}} "
    "AND ReceivedAt BETWEEN fromUnixTimestamp64Milli({first:Int64}) AND fromUnixTimestamp64Milli({last:Int64})"
)
_SAME_TIME: Final = "ReceivedAt = fromUnixTimestamp64Milli({received:Int64}) AND toUnixTimestamp64Nano({column}) = {stamp:Int64}"


def find_stored(engine: Engine, members: Sequence[Member]) -> dict[int, list[int]]:
    """Return {log position: indexes of the identities whose rows are stored} for every request. Raises ClickHouseError."""
    found = {position: _others(engine, request) if request.signal != "traces" else [] for position, request in members}
    rows: list[tuple[str, str, int, int, int]] = []  # trace, span, received, position, index
    for position, request in members:
        if request.signal == "traces":
            spans = _spans(request)
            taken = (index for index, identity in enumerate(request.identities) if not identity.reason)
            rows += [(*spans[index], request.received_ms, position, index) for index in taken]
    for start in range(0, len(rows), SPANS_PER_QUERY):
        some = rows[start : start + SPANS_PER_QUERY]
        received = [each[2] for each in some]
        asked = {"spans": sorted({each[1] for each in some}), "first": min(received), "last": max(received)}
        stored = {(str(trace), str(span), int(str(at))) for trace, span, at in engine.select(_SPANS, asked)}
        for trace, span, at, position, index in some:
            if (trace, span, at) in stored:
                found[position].append(index)
    return found


def _spans(request: Request) -> list[tuple[str, str]]:
    parsed = ExportTraceServiceRequest.FromString(request.raw)
    return [(s.trace_id.hex(), s.span_id.hex()) for r in parsed.resource_spans for g in r.scope_spans for s in g.spans]


def _others(engine: Engine, request: Request) -> list[int]:
    received = request.received_ms
    if request.signal == "logs":
        kinds: list[str | None] = ["logs"] * len(request.identities)
        rows = {"logs": log_rows(request.raw, Accepted(request.identities, itertools.repeat(0)), received_ms=received, batch=0)}
    else:
        kinds = kinds_of(ExportMetricsServiceRequest.FromString(request.raw))
        rows = metric_rows(request.raw, request.identities, received_ms=received, batch=0, first={})
    stored = {kind for kind, own in rows.items() if own and _is_stored(engine, request, kind, json.loads(own[0]))}
    each = enumerate(zip(kinds, request.identities, strict=True))
    return [index for index, (kind, identity) in each if kind in stored and not identity.reason]


def _is_stored(engine: Engine, request: Request, kind: str, row: dict[str, Any]) -> bool:
    table, column, same = (
        (f"{DATABASE}.otel_logs", "Timestamp", ("TraceId", "SpanId", "Body", "RolloutId", "AttemptId"))
        if kind == "logs"
        else (TABLES[kind], "TimeUnix", ("MetricName", "ServiceName", "ScopeName"))
    )
    equal = "".join(f" AND {name} = {{{name}:String}}" for name in same)
    seconds, _, nanos = str(row[column]).partition(".")
    params = {name: row[name] for name in same} | {"received": request.received_ms, "stamp": int(seconds) * 10**9 + int(nanos or 0)}
    return bool(engine.select(f"SELECT 1 FROM {table} WHERE {_SAME_TIME.replace('{column}', column)}{equal} LIMIT 1", params))
