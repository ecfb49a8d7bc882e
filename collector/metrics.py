"""OTLP metrics: validate data points, and build their rows for the stock tables of the Collector's ClickHouse exporter.

One row per data point, in the table of its metric's kind. Metrics have no place in a rollout's order, so they take no sequence
numbers; the tables derive RolloutId and AttemptId from the resource. conformance/metrics has golden vectors of what agents may send.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Exemplar,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)

from agl_otel.collector.decode import JsonRows
from agl_otel.collector.identify import TRAINING, bound_identity, named_by
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Request
from agl_otel.collector.scan import AHEAD_NANO, EARLIEST_UNIX_NANO, TIMESTAMP
from agl_otel.collector.values import to_map
from agl_otel.net.auth import Sender
from agl_otel.traces.engine import DATABASE
from agl_otel_hook.conventions import ATTEMPT_ID, ROLLOUT_ID, TRAINING_FIGURES

NO_DATA: Final = "metric has no data, or of an unknown kind"
TABLES: Final = {
    "gauge": f"{DATABASE}.otel_metrics_gauge",
    "sum": f"{DATABASE}.otel_metrics_sum",
    "histogram": f"{DATABASE}.otel_metrics_histogram",
    "exponential_histogram": f"{DATABASE}.otel_metrics_exponential_histogram",
    "summary": f"{DATABASE}.otel_metrics_summary",
}
"""{the `data` field of an OTLP Metric: its table}."""
_COMMON: Final = (
    "ResourceAttributes", "ResourceSchemaUrl", "ScopeName", "ScopeVersion", "ScopeAttributes", "ScopeDroppedAttrCount", "ScopeSchemaUrl",
    "ServiceName", "MetricName", "MetricDescription", "MetricUnit", "Attributes", "StartTimeUnix", "TimeUnix", "Flags",
)  # fmt: skip
_EXEMPLARS: Final = ("Exemplars.FilteredAttributes", "Exemplars.TimeUnix", "Exemplars.Value", "Exemplars.SpanId", "Exemplars.TraceId")
_OURS: Final = ("ReceivedAt", "BatchId", "BatchPos")
COLUMNS: Final = {
    "gauge": (*_COMMON, "Value", *_EXEMPLARS, *_OURS),
    "sum": (*_COMMON, "Value", *_EXEMPLARS, "AggregationTemporality", "IsMonotonic", *_OURS),
    "histogram": (
        *_COMMON, "Count", "Sum", "BucketCounts", "ExplicitBounds", *_EXEMPLARS, "Min", "Max", "AggregationTemporality", *_OURS
    ),
    "exponential_histogram": (
        *_COMMON, "Count", "Sum", "Scale", "ZeroCount", "PositiveOffset", "PositiveBucketCounts", "NegativeOffset",
        "NegativeBucketCounts", *_EXEMPLARS, "Min", "Max", "AggregationTemporality", *_OURS,
    ),
    "summary": (*_COMMON, "Count", "Sum", "ValueAtQuantiles.Quantile", "ValueAtQuantiles.Value", *_OURS),
}  # fmt: skip
"""Columns of each table's inserts."""
Point = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint | SummaryDataPoint
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_TAKEN: Final = Identity()


def identify_points(request: ExportMetricsServiceRequest, *, now_unix_nano: int) -> Identities:
    """Return one Identity per data point, in the order of the request (an empty metric counts as one): accepted, or why not."""
    latest = now_unix_nano + AHEAD_NANO
    refused = Identity(reason=TIMESTAMP)
    found: list[Identity] = []
    for metric in _metrics(request):
        kind = metric.WhichOneof("data")
        if kind is None:
            found.append(Identity(reason=NO_DATA))
            continue
        for point in getattr(metric, kind).data_points:
            good = EARLIEST_UNIX_NANO <= point.time_unix_nano <= latest and (
                not point.start_time_unix_nano or EARLIEST_UNIX_NANO <= point.start_time_unix_nano <= latest
            )
            found.append(_TAKEN if good else refused)
    return Identities.of(found)


def hold_points(request: ExportMetricsServiceRequest, raw: bytes, found: Identities, sender: Sender) -> tuple[Identities, bytes]:
    """Check an agent's points against its key; return the identities, and the request's bytes, with the key's ids in resources without ids.

    Figures of training are refused; if the key is bound to an attempt, so are points of resources that name another one.
    """
    held = list(found)
    changed = False
    index = 0
    for group in request.resource_metrics:
        named = named_by(group.resource.attributes)
        whose = bound_identity(named, sender.bound) if sender.bound else Identity()
        for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
            reason = TRAINING if metric.name.startswith(TRAINING_FIGURES) else whose.reason
            kind = metric.WhichOneof("data")
            end = index + (len(getattr(metric, kind).data_points) if kind is not None else 1)
            if reason:
                held[index:end] = [each if each.reason else Identity(reason=reason) for each in held[index:end]]
            index = end
        if sender.bound and not whose.reason and (named.rollout_id, named.attempt_id) != sender.bound:
            others = [each for each in group.resource.attributes if each.key not in (ROLLOUT_ID, ATTEMPT_ID)]
            del group.resource.attributes[:]
            group.resource.attributes.extend([*others, *_named(dict(zip((ROLLOUT_ID, ATTEMPT_ID), sender.bound, strict=True)))])
            changed = True
    return Identities.of(held), request.SerializeToString() if changed else raw


def _named(attributes: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in attributes.items()]


def kinds_of(request: ExportMetricsServiceRequest) -> list[str | None]:
    """Return the kind of each data point, in the order of `identify_points`; None for a metric without data."""
    found: list[str | None] = []
    for metric in _metrics(request):
        kind = metric.WhichOneof("data")
        found += [kind] * len(getattr(metric, kind).data_points) if kind is not None else [None]
    return found


def metric_rows(
    raw: bytes,
    identities: Identities,
    *,
    received_ms: int,
    batch: int,
    first: Mapping[str, int],
    counts: Counter[str] | None = None,
) -> dict[str, list[str]]:
    """Return {kind: rows (JSON texts) of the accepted points}; `first` has the BatchPos of each kind's first row (default 0).

    `counts`: see values.to_map.
    """
    rows: dict[str, list[str]] = {}
    taken = iter(identities)
    ours = {"ReceivedAt": f"{received_ms // 1000}.{received_ms % 1000:03d}", "BatchId": batch}
    for resource_metrics in ExportMetricsServiceRequest.FromString(raw).resource_metrics:
        resource = to_map(resource_metrics.resource.attributes, {}, counts=counts)
        for scope_metrics in resource_metrics.scope_metrics:
            scope = scope_metrics.scope
            shared: dict[str, Any] = ours | {
                "ResourceAttributes": resource,
                "ResourceSchemaUrl": resource_metrics.schema_url,
                "ScopeName": scope.name,
                "ScopeVersion": scope.version,
                "ScopeAttributes": to_map(scope.attributes, {}, counts=counts),
                "ScopeDroppedAttrCount": scope.dropped_attributes_count,
                "ScopeSchemaUrl": scope_metrics.schema_url,
                "ServiceName": resource.get("service.name", ""),
            }
            for metric in scope_metrics.metrics:
                kind = metric.WhichOneof("data")
                if kind is None:
                    next(taken)
                    continue
                own = rows.setdefault(kind, [])
                for row in _metric(metric, kind, taken, counts):
                    own.append(_dumps(shared | row | {"BatchPos": first.get(kind, 0) + len(own)}))
    return rows


class MetricRows(JsonRows):
    """Rows of one kind of data point."""

    def __init__(self, kind: str) -> None:
        super().__init__(COLUMNS[kind])
        self._kind = kind

    def add(self, request: Request, numbers: Sequence[int], *, batch: int, first: int, only: frozenset[int] | None) -> None:
        """Add the rows of a request; data points have no sequence numbers."""
        del numbers
        where: dict[str, Any] = {"received_ms": request.received_ms, "batch": batch, "first": {self._kind: first}, "counts": self.counts}
        found = metric_rows(request.raw, request.identities, **where).get(self._kind, [])
        self.rows += [row for position, row in enumerate(found, first) if only is None or position in only]


def _metric(metric: Metric, kind: str, taken: Iterator[Identity], counts: Counter[str] | None) -> Iterator[dict[str, Any]]:
    data = getattr(metric, kind)
    about: dict[str, Any] = {"MetricName": metric.name, "MetricDescription": metric.description, "MetricUnit": metric.unit}
    if kind in ("sum", "histogram", "exponential_histogram"):
        about["AggregationTemporality"] = data.aggregation_temporality
    if kind == "sum":
        about["IsMonotonic"] = data.is_monotonic
    for point in data.data_points:
        if next(taken).reason:
            continue
        row = about | {
            "Attributes": to_map(point.attributes, {}, counts=counts),
            "StartTimeUnix": _nanoseconds(point.start_time_unix_nano),
            "TimeUnix": _nanoseconds(point.time_unix_nano),
            "Flags": point.flags,
        }
        row |= _VALUES[kind](point)
        if kind != "summary" and point.exemplars:
            row |= _exemplars(point.exemplars, counts)
        yield row


def _number(point: NumberDataPoint | Exemplar) -> float | str:
    return _float(point.as_double if point.WhichOneof("value") == "as_double" else float(point.as_int))


def _gauge(point: NumberDataPoint) -> dict[str, Any]:
    return {"Value": _number(point)}


def _histogram(point: HistogramDataPoint) -> dict[str, Any]:
    return _totals(point) | {"BucketCounts": list(point.bucket_counts), "ExplicitBounds": [_float(b) for b in point.explicit_bounds]}


def _exponential(point: ExponentialHistogramDataPoint) -> dict[str, Any]:
    return _totals(point) | {
        "Scale": point.scale,
        "ZeroCount": point.zero_count,
        "PositiveOffset": point.positive.offset,
        "PositiveBucketCounts": list(point.positive.bucket_counts),
        "NegativeOffset": point.negative.offset,
        "NegativeBucketCounts": list(point.negative.bucket_counts),
    }


def _summary(point: SummaryDataPoint) -> dict[str, Any]:
    return {
        "Count": point.count,
        "Sum": _float(point.sum),
        "ValueAtQuantiles.Quantile": [_float(q.quantile) for q in point.quantile_values],
        "ValueAtQuantiles.Value": [_float(q.value) for q in point.quantile_values],
    }


def _totals(point: HistogramDataPoint | ExponentialHistogramDataPoint) -> dict[str, Any]:
    return {"Count": point.count, "Sum": _float(point.sum), "Min": _float(point.min), "Max": _float(point.max)}


_VALUES: Final[dict[str, Any]] = {
    "gauge": _gauge,
    "sum": _gauge,
    "histogram": _histogram,
    "exponential_histogram": _exponential,
    "summary": _summary,
}


def _exemplars(exemplars: Sequence[Exemplar], counts: Counter[str] | None) -> dict[str, Any]:
    return {
        "Exemplars.FilteredAttributes": [to_map(each.filtered_attributes, {}, counts=counts) for each in exemplars],
        "Exemplars.TimeUnix": [_nanoseconds(each.time_unix_nano) for each in exemplars],
        "Exemplars.Value": [_number(each) for each in exemplars],
        "Exemplars.SpanId": [each.span_id.hex() for each in exemplars],
        "Exemplars.TraceId": [each.trace_id.hex() for each in exemplars],
    }


def _metrics(request: ExportMetricsServiceRequest) -> Iterator[Metric]:
    return (metric for r in request.resource_metrics for s in r.scope_metrics for metric in s.metrics)


def _float(value: float) -> float | str:
    # JSON cannot express non-finite numbers; ClickHouse reads these.
    return value if value - value == 0 else "nan" if value != value else "inf" if value > 0 else "-inf"


def _nanoseconds(stamp: int) -> str | int:
    return f"{stamp // 10**9}.{stamp % 10**9:09d}" if EARLIEST_UNIX_NANO <= stamp < 2**63 else 0
