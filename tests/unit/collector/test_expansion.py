"""The size of a request's rows is estimated from its bytes, and requests with too large rows are refused."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from agl_otel.collector.decode import Accepted, log_rows, span_rows
from agl_otel.collector.expansion import MESSAGES, Parsed, check, size_of
from agl_otel.collector.expansion import size as estimate
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Request, Signal
from agl_otel.collector.merged import messages
from agl_otel.collector.metrics import metric_rows
from agl_otel.errors import DataError

from .otlp_fields import Repeated, enclosed, repeated_fields

KIB = 1 << 10
LONG = [KeyValue(key="long", value=AnyValue(string_value="x" * 64 * KIB))]


def spans(resource: Resource, count: int) -> ExportTraceServiceRequest:
    parts = [ScopeSpans(spans=[Span(trace_id=b"t" * 16, span_id=b"s" * 8)] * count)]
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=parts)])


def logs(resource: Resource, scope: InstrumentationScope, count: int) -> ExportLogsServiceRequest:
    parts = [ScopeLogs(scope=scope, log_records=[LogRecord()] * count)]
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=resource, scope_logs=parts)])


def points(description: str, count: int) -> ExportMetricsServiceRequest:
    metric = Metric(name="m", description=description, gauge=Gauge(data_points=[NumberDataPoint(as_int=1)] * count))
    return ExportMetricsServiceRequest(resource_metrics=[ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[metric])])])


@pytest.mark.parametrize(
    "request_",
    [
        spans(Resource(attributes=LONG), 100),
        ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(scope=InstrumentationScope(name="n" * 64 * KIB), spans=[Span()] * 100)])]
        ),
        logs(Resource(attributes=LONG), InstrumentationScope(), 100),
        logs(Resource(), InstrumentationScope(attributes=LONG), 100),
        points("d" * 64 * KIB, 100),
    ],
    ids=["resource", "scope", "logs", "scope of logs", "description"],
)
def test_content_shared_by_many_rows_counts_for_each_of_them(request_: Parsed) -> None:
    size = request_.ByteSize()
    assert size < 100 * KIB < 6 << 20 < check(estimate(request_, request_.SerializeToString(), 0), 1 << 30) < 7 << 20
    with pytest.raises(DataError, match=r"AGL_MAX_EXPANDED_BYTES \(1048576\)"):
        check(estimate(request_, request_.SerializeToString(), 0), 1 << 20)


def test_a_large_request_that_shares_little_is_not_overestimated() -> None:
    request = spans(Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value="agent"))]), 2)
    for span in request.resource_spans[0].scope_spans[0].spans:
        span.attributes.append(LONG[0])
    assert 128 * KIB < check(estimate(request, request.SerializeToString(), 0), 1 << 20) < 130 * KIB


VALUES = st.recursive(
    st.one_of(
        st.builds(AnyValue),
        st.text(max_size=20).map(lambda text: AnyValue(string_value=text)),
        st.integers(-(2**63), 2**63 - 1).map(lambda number: AnyValue(int_value=number)),
        st.booleans().map(lambda truth: AnyValue(bool_value=truth)),
        st.binary(max_size=20).map(lambda data: AnyValue(bytes_value=data)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=20).map(lambda items: AnyValue(array_value=ArrayValue(values=items))),
        st.dictionaries(st.text(max_size=3), inner, max_size=5).map(
            lambda items: AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in items.items()]))
        ),
    ),
    max_leaves=40,
)


@given(st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=4))
def test_no_resource_takes_more_of_a_row_than_estimated(attributes: dict[str, AnyValue]) -> None:
    """Compared without what every row has."""
    resource = Resource(attributes=[KeyValue(key=key, value=value) for key, value in attributes.items()])
    several, few = spans(resource, 10), spans(Resource(), 10)
    identities = [Identity("ro-1", "at-1")] * 10

    def rows(request: ExportTraceServiceRequest) -> int:
        made = span_rows(request.SerializeToString(), Accepted(Identities.of(identities), iter(range(10))), received_ms=1, batch=1)
        return sum(len(row.encode()) for row in made)

    assert rows(several) - rows(few) <= 2 * check(estimate(several, several.SerializeToString(), 0), 1 << 30)


def test_the_size_of_a_logged_request_is_the_noted_one_or_is_computed() -> None:
    wide = spans(Resource(attributes=LONG), 100)
    identities = [Identity("ro-1", "at-1")] * 100
    request = Request("traces", 1, Identities.of(identities), wide.SerializeToString())
    assert size_of(request) == check(estimate(wide, wide.SerializeToString(), 0), 1 << 30)
    assert size_of(Request("traces", 1, Identities.of(identities), b"", expanded=7)) == 7
    records, metric = logs(Resource(attributes=LONG), InstrumentationScope(), 9), points("d" * KIB, 9)
    for request, each in (
        (Request("logs", 1, Identities.of([Identity()] * 9), records.SerializeToString()), records),
        (Request("metrics", 1, Identities.of([Identity()] * 9), metric.SerializeToString()), metric),
    ):
        assert size_of(request) == check(estimate(each, each.SerializeToString(), 0), 1 << 30)


def test_logs_and_points_are_not_larger_than_estimated() -> None:
    records, metric = logs(Resource(attributes=LONG), InstrumentationScope(attributes=LONG), 20), points("d" * 64 * KIB, 20)
    sent: list[tuple[Signal, Parsed]] = [("logs", records), ("metrics", metric)]
    for signal, request in sent:
        assert row_bytes(signal, request.SerializeToString(), 20) <= check(estimate(request, request.SerializeToString(), 0), 1 << 30)


def row_bytes(signal: Signal, raw: bytes, count: int) -> int:
    """Return the size in bytes of the JSON rows of a request with `count` items."""
    taken = [Identity("ro-1", "at-1")] * count
    if signal == "traces":
        rows = list(span_rows(raw, Accepted(Identities.of(taken), iter(range(count))), received_ms=1, batch=1))
    elif signal == "logs":
        rows = list(log_rows(raw, Accepted(Identities.of(taken), iter(range(count))), received_ms=1, batch=1))
    else:
        rows = [row for rows in metric_rows(raw, Identities.of(taken), received_ms=1, batch=1, first={}).values() for row in rows]
    return sum(len(row.encode()) for row in rows)


@pytest.mark.parametrize("place", repeated_fields(), ids=lambda place: place.name)
def test_every_kind_of_record_is_estimated(place: Repeated) -> None:
    """For any repeated element, even an empty one of two bytes, the rows are not much longer than estimated."""
    field, count = place.field, 3000
    single = field.message_type is None and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    raw = place.request(enclosed(field, bytes(8 * count)) if single else enclosed(field, b"") * count)
    request = MESSAGES[place.signal].FromString(raw)
    thought = check(estimate(request, raw, messages(place.signal, raw)), 1 << 30)
    items = count if field.name in {"spans", "log_records", "metrics", "data_points"} else 1
    assert row_bytes(place.signal, raw, items) <= 1.1 * thought


NESTED = AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="\x01" * 64 * KIB)]))


@pytest.mark.parametrize("value", [AnyValue(string_value="\x01" * 64 * KIB), NESTED], ids=["text", "text in a list"])
def test_control_characters_count_as_they_are_written(value: AnyValue) -> None:
    """Each takes six bytes in a row's JSON, and seven in a list, whose text is JSON too."""
    own = [KeyValue(key="k", value=value)]
    span, record = Span(attributes=own), LogRecord(body=value)
    point = NumberDataPoint(attributes=own, as_int=1)
    sent: list[tuple[Signal, Parsed]] = [
        ("traces", ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])),
        ("logs", ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=[record])])])),
        (
            "metrics",
            ExportMetricsServiceRequest(
                resource_metrics=[
                    ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[Metric(name="m", gauge=Gauge(data_points=[point]))])])
                ]
            ),
        ),
    ]
    for signal, request in sent:
        raw = request.SerializeToString()
        assert 6 * 64 * KIB < row_bytes(signal, raw, 1) <= check(estimate(request, raw, messages(signal, raw)), 1 << 30) < 8 * 64 * KIB


def test_token_ids_and_log_probs_do_not_count_as_control_characters() -> None:
    ids = ArrayValue(values=[AnyValue(int_value=n % 150_000) for n in range(100_000)])
    probs = ArrayValue(values=[AnyValue(double_value=-n / 1024) for n in range(100_000)])
    own = [KeyValue(key=k, value=AnyValue(array_value=v)) for k, v in (("ids", ids), ("probs", probs))]
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[Span(attributes=own)])])])
    raw = request.SerializeToString()
    found = messages("traces", raw)
    assert check(estimate(request, raw, found), 1 << 30) <= len(raw) + found * 16 + 2 * KIB
