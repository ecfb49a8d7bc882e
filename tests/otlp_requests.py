"""Draws OTLP requests: everything that the protocol allows, and bytes that it does not."""

from __future__ import annotations

import time
from random import Random

from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from agl_otel.collector.scan import ID_KEYS
from agl_otel_hook import conventions

NOW = time.time_ns()
TOKEN_KEYS = (conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS)
ODD_TEXTS = [
    *("", "a/b\\/", '"', "\u2028x\u2029", "\u2028\u2028", "\x00\x01\x1f\x7f", "\r\n\t\b\f"),
    *("é€😀", "\\u2028", "{}", "[1]", "a,b", "'"),
]
TEXT = st.sampled_from(ODD_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = (
    st.sampled_from([conventions.LLM_CALL, "gen_ai.input.messages", "agentlightning.reward.0.value"])
    | st.sampled_from(["k", "n", "resource:a", "event.0:b", "link.12:c", "span:d", "scope:e", "event.٣:f", "a:b", "service.name"])
    | TEXT
)
INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1, 2**53 + 1])
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1.0, 0.1, 1e16, 1e-4, 1e-5, 1.5e-6, 1e-7, 1e20, 1e21, 1.25e22, -1e17, 5e-324, 1e300])
SCALARS = st.one_of(
    TEXT.map(lambda v: AnyValue(string_value=v)),
    st.booleans().map(lambda v: AnyValue(bool_value=v)),
    INTEGERS.map(lambda v: AnyValue(int_value=v)),
    FLOATS.map(lambda v: AnyValue(double_value=v)),
    st.just(AnyValue()),
    st.just(AnyValue.FromString(b"\x40\x03")),
)
LISTS = st.lists(SCALARS, max_size=4) | st.lists(FLOATS.map(lambda v: AnyValue(double_value=v)), min_size=16, max_size=18)
PLAIN = SCALARS | LISTS.map(lambda items: AnyValue(array_value=ArrayValue(values=items)))
ANYTHING = st.recursive(
    PLAIN | st.binary(max_size=6).map(lambda v: AnyValue(bytes_value=v)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: AnyValue(array_value=ArrayValue(values=items))),
        st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda pairs: AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in pairs]))
        ),
    ),
    max_leaves=5,
)
IDS = {size: st.binary(min_size=size, max_size=size) | st.sampled_from([b"", bytes(size), b"odd"]) for size in (8, 16)}
TOKENS = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=20).map(lambda ids: [AnyValue(int_value=v) for v in ids]),
    st.lists(st.floats(width=32), max_size=20).map(lambda numbers: [AnyValue(double_value=v) for v in numbers]),
    st.lists(st.floats(-30, 0), max_size=20).map(lambda numbers: [AnyValue(double_value=v) for v in numbers]),
    st.lists(SCALARS, max_size=3),
).map(lambda items: AnyValue(array_value=ArrayValue(values=items)))


@st.composite
def attributes(draw: st.DrawFn, *, tokens: bool = False) -> list[KeyValue]:
    pairs = draw(st.lists(st.tuples(KEYS, ANYTHING) | st.tuples(st.sampled_from(ID_KEYS), SCALARS), max_size=4))
    if tokens:
        pairs += draw(st.lists(st.tuples(st.sampled_from(TOKEN_KEYS), TOKENS | ANYTHING), max_size=3))
    return [KeyValue(key=key, value=value) for key, value in draw(st.permutations(pairs))]


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = NOW - draw(st.integers(0, 10**12) | st.just(NOW - 5))
    span = Span(
        trace_id=draw(IDS[16]),
        span_id=draw(IDS[8]),
        parent_span_id=draw(st.sampled_from([b"", bytes(8), b"\x00\x01parent", b"short"])),
        trace_state=draw(TEXT),
        name=draw(TEXT | st.sampled_from([conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL])),
        kind=draw(st.integers(-1, 9)),  # pyright: ignore[reportArgumentType] - enums are open
        start_time_unix_nano=start,
        end_time_unix_nano=start + draw(st.sampled_from([0, 1, 10**9, -5])),
        attributes=draw(attributes(tokens=True)),
        dropped_attributes_count=draw(st.integers(0, 3)),
        flags=draw(st.integers(0, 2**32 - 1)),
    )
    if draw(st.booleans()):
        span.status.CopyFrom(Status(code=draw(st.integers(-1, 4)), message=draw(TEXT)))  # pyright: ignore[reportArgumentType] - as above
    for _ in range(draw(st.integers(0, 2))):
        when = draw(st.sampled_from([0, NOW, 2**63]))
        span.events.add(time_unix_nano=when, name=draw(TEXT), attributes=draw(attributes()))
    for _ in range(draw(st.integers(0, 1))):
        span.links.add(trace_id=bytes(16), span_id=b"12345678", trace_state=draw(TEXT), attributes=draw(attributes()))
    return span


@st.composite
def trace_requests(draw: st.DrawFn) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        resource = Resource(attributes=draw(attributes()))
        scopes = [
            ScopeSpans(scope=InstrumentationScope(name=draw(TEXT), version=draw(TEXT)), spans=draw(st.lists(spans(), max_size=3)))
            for _ in range(draw(st.integers(0, 2)))
        ]
        request.resource_spans.append(ResourceSpans(resource=resource if draw(st.booleans()) else None, scope_spans=scopes))
    return request


@st.composite
def records(draw: st.DrawFn) -> LogRecord:
    return LogRecord(
        time_unix_nano=draw(st.sampled_from([0, NOW, 1, 2**63])),
        observed_time_unix_nano=draw(st.sampled_from([0, NOW, 1])),
        severity_number=draw(st.integers(-1, 300)),  # pyright: ignore[reportArgumentType] - enums are open
        severity_text=draw(TEXT),
        body=draw(ANYTHING) if draw(st.booleans()) else None,
        attributes=draw(attributes(tokens=True)),
        flags=draw(st.integers(0, 2**32 - 1)),
        trace_id=draw(IDS[16]),
        span_id=draw(IDS[8]),
        event_name=draw(TEXT),
    )


@st.composite
def log_requests(draw: st.DrawFn) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        group = request.resource_logs.add(schema_url=draw(TEXT))
        if draw(st.booleans()):
            group.resource.attributes.extend(draw(attributes()))
        for _ in range(draw(st.integers(0, 2))):
            scope = group.scope_logs.add(schema_url=draw(TEXT), log_records=draw(st.lists(records(), max_size=3)))
            scope.scope.CopyFrom(InstrumentationScope(name=draw(TEXT), version=draw(TEXT), attributes=draw(attributes())))
    return request


def mutate(raw: bytes, random: Random) -> bytes:
    """Change bytes as damage, or a client with another encoder, would: cut, flip, repeat or insert some."""
    changed = bytearray(raw)
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(changed))
        end = min(len(changed), at + random.randint(1, 12))
        match random.randrange(6):
            case 0:
                changed[at:end] = b""
            case 1 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 2:
                changed[at:at] = changed[at:end]
            case 3:
                changed[at:at] = random.choice(FRAGMENTS)
            case 4 if at < len(changed):
                changed[at] = random.choice(TAGS)
            case _:
                changed += random.choice(FRAGMENTS)
    return bytes(changed)


TAGS = bytes(number << 3 | kind for number in (1, 2, 3, 5, 6, 9, 11, 13, 15) for kind in (0, 1, 2, 3, 5))
FRAGMENTS = [
    *(b"\x0b\x08\x01\x0c", b"\x0b\x0c", b"\x0b\x13\x14\x0c", b"\x0b" * 120 + b"\x0c" * 120, b"\x0c", b"\x00", b"\x07", b"\x0e"),
    *(b"\xf8\xff\xff\xff\x0f\x01", b"\xf8\xff\xff\xff\x1f\x01", b"\x08" + b"\xff" * 9 + b"\x7f", b"\x08" + b"\xff" * 10 + b"\x01"),
    *(b"\x0a\x80\x80\x80\x80\x00", b"\x0a\x80\x80\x80\x80\x80\x00", b"\x0a\x02\xc3\x28", b"\x12\x00"),
    *(b"\x2a\x00", b"\x1a\x00", b"\x0a\x00", b"\x4a\x00"),
]
"""Unknown groups, fields and wire types, numbers and lengths longer than needed or than allowed, text that is no UTF-8, empty messages."""
