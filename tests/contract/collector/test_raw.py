"""The fast path and decode.py produce the same rows, in every column, from any valid OTLP."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from agl_otel.collector import plain_pb2 as plain
from agl_otel.collector.decode import TRACE_COLUMNS, span_rows
from agl_otel.collector.identify import Identity
from agl_otel.collector.journal import Batch, Request
from agl_otel.collector.raw import is_odd, pack
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.values import REPEATED
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.schema import OTLP_ROWS, create_schema
from agl_otel.traces.sql import OTLP_ROWS_SCHEMA
from agl_otel_hook import conventions

VECTORS = Path(__file__).parents[3] / "collector" / "conformance" / "values" / "values.json"
EXAMPLES = 15  # each costs two inserts and two queries
NOW = time.time_ns()
TOKEN_KEYS = (conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS)
ODD_TEXTS = [
    *("", "a/b\\/", '"', "\u2028x\u2029", "\u2028\u2028", "\x00\x01\x1f\x7f", "\r\n\t\b\f"),
    *("é€😀", "\\u2028", "{}", "[1]", "a,b", "'"),
]
TEXT = st.sampled_from(ODD_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.sampled_from(["k", "n", "resource:a", "event.0:b", "link.12:c", "span:d", "scope:e", "event.٣:f", "a:b", "service.name"]) | TEXT
INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1, 2**53 + 1])
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1.0, 0.1, 1e16, 1e-4, 1e-5, 1.5e-6, 1e-7, 1e20, 1e21, 1.25e22, -1e17, 5e-324, 1e300])
SCALARS = st.one_of(
    TEXT.map(lambda v: AnyValue(string_value=v)),
    st.booleans().map(lambda v: AnyValue(bool_value=v)),
    INTEGERS.map(lambda v: AnyValue(int_value=v)),
    FLOATS.map(lambda v: AnyValue(double_value=v)),
    st.just(AnyValue()),
    st.just(AnyValue(string_value_strindex=3)),
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
TOKENS = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=20).map(lambda ids: [AnyValue(int_value=v) for v in ids]),
    st.lists(st.floats(width=32), max_size=20).map(lambda numbers: [AnyValue(double_value=v) for v in numbers]),
    st.lists(st.floats(-30, 0), max_size=20).map(lambda numbers: [AnyValue(double_value=v) for v in numbers]),
    st.lists(SCALARS, max_size=3),
).map(lambda items: AnyValue(array_value=ArrayValue(values=items)))


@st.composite
def attributes(draw: st.DrawFn, *, plain_only: bool, tokens: bool = False) -> list[KeyValue]:
    pairs = draw(st.lists(st.tuples(KEYS, PLAIN if plain_only else ANYTHING), max_size=4))
    if tokens:
        pairs += draw(st.lists(st.tuples(st.sampled_from(TOKEN_KEYS), TOKENS | (PLAIN if plain_only else ANYTHING)), max_size=3))
    return [KeyValue(key=key, value=value) for key, value in draw(st.permutations(pairs))]


@st.composite
def spans(draw: st.DrawFn) -> Span:
    plain_only = draw(st.booleans())
    start = NOW - draw(st.integers(0, 10**12))
    span = Span(
        trace_id=draw(st.binary(min_size=16, max_size=16)),
        span_id=draw(st.binary(min_size=8, max_size=8)),
        parent_span_id=draw(st.sampled_from([b"", bytes(8), b"\x00\x01parent"])),
        trace_state=draw(TEXT),
        name=draw(TEXT),
        kind=draw(st.integers(-1, 9)),  # pyright: ignore[reportArgumentType] - enums are open
        start_time_unix_nano=start,
        end_time_unix_nano=start + draw(st.sampled_from([0, 1, 10**9, -5])),
        attributes=draw(attributes(plain_only=plain_only, tokens=True)),
        dropped_attributes_count=draw(st.integers(0, 3)),
        flags=draw(st.integers(0, 2**32 - 1)),
    )
    if draw(st.booleans()):
        span.status.CopyFrom(Status(code=draw(st.integers(-1, 4)), message=draw(TEXT)))  # pyright: ignore[reportArgumentType] - as above
    if not plain_only:
        for _ in range(draw(st.integers(0, 2))):
            when = draw(st.sampled_from([0, NOW]))
            span.events.add(time_unix_nano=when, name=draw(TEXT), attributes=draw(attributes(plain_only=False)))
        for _ in range(draw(st.integers(0, 1))):
            span.links.add(trace_id=bytes(16), span_id=b"12345678", attributes=draw(attributes(plain_only=False)))
    return span


@st.composite
def requests(draw: st.DrawFn) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        resource = Resource(attributes=draw(attributes(plain_only=False)))
        scopes = [
            ScopeSpans(scope=InstrumentationScope(name=draw(TEXT), version=draw(TEXT)), spans=draw(st.lists(spans(), max_size=3)))
            for _ in range(draw(st.integers(0, 2)))
        ]
        request.resource_spans.append(ResourceSpans(resource=resource if draw(st.booleans()) else None, scope_spans=scopes))
    return request


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path_factory.mktemp("rows") / "traces")
    create_schema(made, where="the test")
    yield made
    made.close()


batches = itertools.count(1)


MAPS = ("SpanAttributes", "ResourceAttributes", "AttrTypes", "Events.Attributes")


def rows(engine: ChdbEngine, batch: int) -> list[list[object]]:
    columns = [column for column in TRACE_COLUMNS if column != "BatchId"]
    shown = [f"toString(`{column}`)" if column in MAPS else f"`{column}`" for column in columns]
    return engine.select(f"SELECT {', '.join(shown)} FROM otel.otel_traces WHERE BatchId = {batch} ORDER BY BatchPos")


def compare(engine: ChdbEngine, sent: list[bytes], rejected: frozenset[int] = frozenset()) -> set[int]:
    """Compare both paths on one batch of requests; every plain span must have taken the fast one. Returns the positions that did not."""
    slow, fast = next(batches), next(batches)
    texts: list[str] = []
    data = b""
    left: set[int] = set()
    first = 0
    for raw in sent:
        count = sum(len(s.spans) for r in ExportTraceServiceRequest.FromString(raw).resource_spans for s in r.scope_spans)
        identities = [Identity(f"ro-{n}", "at", None, "why" if n in rejected else "") for n in range(count)]
        numbers = [7 + first + n for n in range(sum(not i.reason for i in identities))]
        texts += span_rows(raw, identities, iter(numbers), received_ms=NOW // 10**6, batch=slow, first=first)
        packed = pack(raw, identities, numbers, received_ms=NOW // 10**6, batch=fast, first=first, stored=frozenset())
        data += packed.data
        left |= packed.left
        first += len(numbers)
    if texts:
        engine.insert("otel.otel_traces", TRACE_COLUMNS, "\n".join(texts).encode())
    if data:
        engine.insert_protobuf(OTLP_ROWS, OTLP_ROWS_SCHEMA, data)
    position = TRACE_COLUMNS.index("BatchPos") - 1  # without BatchId
    expected = [row for row in rows(engine, slow) if row[position] not in left]
    assert rows(engine, fast) == expected
    return left


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(st.lists(requests(), min_size=1, max_size=6), st.frozensets(st.integers(0, 5), max_size=2))
def test_both_paths_produce_the_same_rows(engine: ChdbEngine, sent: list[ExportTraceServiceRequest], rejected: frozenset[int]) -> None:
    compare(engine, [request.SerializeToString() for request in sent], rejected)


def test_every_character_of_a_list_is_escaped_alike(engine: ChdbEngine) -> None:
    texts = [chr(code) for code in (*range(0x250), *range(0x2000, 0x2070), 0xFEFF, 0xFFFD, 0xFFFF, 0x10FFFF)]
    upper = "\x0b\x0e\x0f\x1a\x1b\x1c\x1d\x1e\x1f"  # ClickHouse writes their escapes with capital letters
    request = one_span(attributes=[KeyValue(key="k", value=list_of([text for text in texts if text not in upper]))])
    spans = request.resource_spans[0].scope_spans[0].spans
    for text in upper:
        spans.append(one_span(attributes=[KeyValue(key="k", value=list_of([f"a{text}"]))]).resource_spans[0].scope_spans[0].spans[0])
    assert compare(engine, [request.SerializeToString()]) == set(range(1, 10))


def list_of(texts: list[str]) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in texts]))


def test_the_golden_vectors_give_these_texts_and_types_on_both_paths(engine: ChdbEngine) -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    values = [json_format.ParseDict(vector["value"], AnyValue()) for vector in vectors]
    left = compare(engine, [one_span(attributes=[KeyValue(key="k", value=value)]).SerializeToString() for value in values])
    assert 15 < len(left) < len(vectors) - 15
    for road in engine.select("SELECT DISTINCT BatchId FROM otel.otel_traces ORDER BY BatchId DESC LIMIT 2"):
        columns = "BatchPos, SpanAttributes['k'], AttrTypes['k']"
        for position, text, name in engine.select(f"SELECT {columns} FROM otel.otel_traces WHERE BatchId = {road[0]}"):
            assert (text, name) == (vectors[int(str(position))]["text"], vectors[int(str(position))]["type"])


def test_repeated_keys_are_counted_on_both_paths(engine: ChdbEngine) -> None:
    twice = [KeyValue(key="k", value=AnyValue(int_value=number)) for number in range(3)]
    tokens = [KeyValue(key=TOKEN_KEYS[0], value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)]))) for _ in range(2)]
    request = one_span(attributes=[*twice, *tokens])
    request.resource_spans[0].resource.CopyFrom(Resource(attributes=twice))
    other = (
        one_span(attributes=[*twice, *tokens, KeyValue(key="nan", value=AnyValue(double_value=math.nan))])
        .resource_spans[0]
        .scope_spans[0]
        .spans[0]
    )
    request.resource_spans[0].scope_spans[0].spans.append(other)
    raw = request.SerializeToString()
    for fast_from in (1, 1 << 30):
        batch = next(batches)
        member = (batch, Request("traces", NOW // 10**6, [Identity("ro", "at", 1), Identity("ro", "at", 2)], raw))
        store = BatchStore(engine, Path("unused"), fast_from_spans=fast_from)
        store.store(Batch(batch, batch, batch), [member], in_doubt=False)
        assert (store.counts[REPEATED], store.counts["fast"]) == (8, 1 if fast_from == 1 else 0)


def one_span(**values: Any) -> ExportTraceServiceRequest:
    span = Span(trace_id=bytes(15) + b"1", span_id=bytes(7) + b"1", start_time_unix_nano=NOW, end_time_unix_nano=NOW, **values)
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(attributes(plain_only=True, tokens=True))
def test_plain_spans_take_the_fast_path(values: list[KeyValue]) -> None:
    raw = one_span(attributes=values).SerializeToString()
    assume(not is_odd(raw))
    assert pack(raw, [Identity("ro", "at")], [1], received_ms=1, batch=1, first=0, stored=()).left == frozenset()


@pytest.mark.parametrize(
    "value",
    [
        AnyValue(bytes_value=b""),
        AnyValue(bytes_value=b"\x0a\x02\x0a\x00"),
        AnyValue(bytes_value=b"\xff\xff"),
        AnyValue(kvlist_value=KeyValueList()),
        AnyValue(array_value=ArrayValue(values=[AnyValue(array_value=ArrayValue())])),
        AnyValue(array_value=ArrayValue(values=[AnyValue(double_value=float("nan"))])),
    ],
)
def test_only_spans_that_are_not_plain_are_left_to_the_slow_path(engine: ChdbEngine, value: AnyValue) -> None:
    request = one_span(attributes=[KeyValue(key="k", value=value)])
    request.resource_spans[0].scope_spans[0].spans.append(one_span(name="plain").resource_spans[0].scope_spans[0].spans[0])
    left = compare(engine, [request.SerializeToString()])
    assert left in ({0}, {0, 1})
    assert left == {0} or value.bytes_value == b"\xff\xff", "only what cannot be parsed at all takes its neighbours along"


def test_a_client_cannot_set_the_collectors_own_fields(engine: ChdbEngine) -> None:
    raw = one_span(attributes=[KeyValue(key="k", value=AnyValue(int_value=1))]).SerializeToString()
    forged = plain.Request.FromString(raw)
    forged.batch_id, forged.received_ms = 99, 99
    forged.resource_spans[0].prepared = plain.Prepared(attributes=[plain.Pair(key="forged", value="1")]).SerializeToString()
    span = forged.resource_spans[0].scope_spans[0].spans[0]
    span.rollout_id, span.attempt_id, span.sequence_id, span.row = "ro-forged", "at-forged", 99, 99
    span.tokens = plain.Tokens(prompt_token_ids=b"\1\0\0\0", columns=["k"]).SerializeToString()
    assert compare(engine, [forged.SerializeToString()]) == set()


def test_repeated_and_unknown_fields_change_nothing(engine: ChdbEngine) -> None:
    first = ResourceSpans(resource=Resource(attributes=[KeyValue(key="a", value=AnyValue(int_value=1))])).SerializeToString()
    second = ResourceSpans(resource=Resource(attributes=[KeyValue(key="b", value=AnyValue(string_value="x"))])).SerializeToString()
    value = AnyValue(string_value="first").SerializeToString() + AnyValue(int_value=2).SerializeToString() + b"\xf8\x07\x01"
    pair = b"\x0a\x01k\x12" + bytes([len(value)]) + value
    span = one_span(name="n").resource_spans[0].scope_spans[0].spans[0].SerializeToString() + b"\x4a" + bytes([len(pair)]) + pair
    scope = b"\x12" + bytes([len(span)]) + span
    group = first + b"\x12" + bytes([len(scope)]) + scope + second
    assert len(group) < 256
    raw = b"\x0a" + bytes([len(group) & 0x7F | 0x80, len(group) >> 7]) + group
    parsed = ExportTraceServiceRequest.FromString(raw)
    assert [a.key for a in parsed.resource_spans[0].resource.attributes] == ["a", "b"]
    assert parsed.resource_spans[0].scope_spans[0].spans[0].attributes[0].value.int_value == 2
    assert compare(engine, [raw]) == set()


def test_stored_spans_are_left_out(engine: ChdbEngine) -> None:
    request = one_span(name="a")
    request.resource_spans[0].scope_spans[0].spans.append(one_span(name="b").resource_spans[0].scope_spans[0].spans[0])
    batch = next(batches)
    identities = [Identity("ro", "at"), Identity("ro", "at")]
    packed = pack(request.SerializeToString(), identities, [1, 2], received_ms=NOW // 10**6, batch=batch, first=5, stored={5})
    engine.insert_protobuf(OTLP_ROWS, OTLP_ROWS_SCHEMA, packed.data)
    assert engine.select(f"SELECT SpanName, SequenceId, BatchPos FROM otel.otel_traces WHERE BatchId = {batch}") == [["b", 2, 6]]


def test_identities_that_do_not_match_the_spans_are_an_error() -> None:
    with pytest.raises(ValueError, match="1 spans"):
        pack(one_span().SerializeToString(), [Identity(), Identity()], [1, 2], received_ms=1, batch=1, first=0, stored=())


def test_both_schemas_agree_on_every_number() -> None:
    ours = {(m, f.number, f.name) for m, d in plain.DESCRIPTOR.message_types_by_name.items() for f in d.fields}
    theirs: set[tuple[str, int, str]] = set()
    message = ""
    for line in OTLP_ROWS_SCHEMA.read_text().splitlines():
        words = line.replace(";", "").split("//")[0].split()
        if words[:1] == ["message"]:
            message = words[1]
        elif "=" in words and words[0] != "syntax":
            theirs.add((message, int(words[words.index("=") + 1]), words[words.index("=") - 1]))
    assert theirs <= ours
    assert {name for _, _, name in ours - theirs} == {"resource", "events", "links", "kvlist_value", "bytes_value", "array_value", "again"}
