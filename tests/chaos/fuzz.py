"""Garbage: random bytes, requests damaged at random, and valid ones with the strangest values, on both ports and for every signal.

Whatever comes is answered with a status that a client can act on; what was taken is readable, as many rows as were acked.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
from collections import Counter
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel_hook import conventions
from tests.chaos.world import World

HTTP_ANSWERS: Final = frozenset({200, 400, 413, 415})
GRPC_ANSWERS: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})
NOW: Final = 1_760_000_000 * 10**9

values = st.deferred(
    lambda: st.one_of(
        st.text(max_size=20).map(lambda v: AnyValue(string_value=v)),
        st.booleans().map(lambda v: AnyValue(bool_value=v)),
        st.integers(-(2**63), 2**63 - 1).map(lambda v: AnyValue(int_value=v)),
        st.floats().map(lambda v: AnyValue(double_value=v)),
        st.binary(max_size=20).map(lambda v: AnyValue(bytes_value=v)),
        st.lists(values, max_size=3).map(lambda v: AnyValue(array_value=ArrayValue(values=v))),
        pairs.map(lambda v: AnyValue(kvlist_value=KeyValueList(values=v))),
        st.just(AnyValue()),
    )
)
keys = st.one_of(
    st.text(max_size=10),
    st.sampled_from(
        [
            conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID, conventions.LLM_PROMPT_TOKEN_IDS,
            conventions.LLM_RESPONSE_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS, conventions.PROCESS, "service.name", "",
        ]
    ),
)  # fmt: skip
pairs = st.lists(st.builds(KeyValue, key=keys, value=values), max_size=4)
ids = st.sampled_from(["ro-f", "ro-f2", "ro g", "", "ro-" + "x" * 200, "ro-\0", "ro-ä"]).map(lambda v: AnyValue(string_value=v))
resources = st.one_of(
    pairs, st.lists(st.builds(KeyValue, key=st.sampled_from([conventions.ROLLOUT_ID, conventions.ATTEMPT_ID]), value=ids), max_size=2)
)
times = st.one_of(st.integers(NOW, NOW + 10**9), st.integers(0, 2**64 - 1))


def _bytes(size: int) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(min_size=size, max_size=size), st.binary(max_size=size + 4))


events = st.builds(Span.Event, time_unix_nano=times, name=st.text(max_size=5), attributes=pairs)
links = st.builds(Span.Link, trace_id=_bytes(16), span_id=_bytes(8), trace_state=st.text(max_size=5), attributes=pairs)
spans = st.builds(
    Span, trace_id=_bytes(16), span_id=_bytes(8), parent_span_id=_bytes(8), kind=st.integers(-(2**31), 2**31 - 1),
    start_time_unix_nano=times, end_time_unix_nano=times, attributes=pairs, trace_state=st.text(max_size=5),
    events=st.lists(events, max_size=2), links=st.lists(links, max_size=2),
    name=st.one_of(st.text(max_size=8), st.just(conventions.SPAN_ATTEMPT)), flags=st.integers(0, 2**32 - 1),
)  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """A valid traces request with strange values."""
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        group = request.resource_spans.add()
        group.resource.attributes.extend(draw(resources))
        for _ in range(draw(st.integers(0, 2))):
            part = group.scope_spans.add()
            part.scope.name = draw(st.text(max_size=5))
            part.spans.extend(draw(st.lists(spans, max_size=3)))
    return request.SerializeToString()


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """A valid logs request with strange values."""
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(draw(resources))
    part = group.scope_logs.add()
    for _ in range(draw(st.integers(0, 3))):
        record = part.log_records.add(
            time_unix_nano=draw(times), severity_number=draw(st.integers(-5, 100)), severity_text=draw(st.text(max_size=5)),
            trace_id=draw(_bytes(16)), span_id=draw(_bytes(8)), attributes=draw(pairs),
        )  # fmt: skip
        record.body.CopyFrom(draw(values))
    return request.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A request some bytes of which are others, missing or there twice."""
    data = bytearray(draw(st.one_of(traces(), logs())))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        place = draw(st.integers(0, len(data) - 1))
        how = draw(st.integers(0, 3))
        if how == 0:
            data[place] = draw(st.integers(0, 255))
        elif how == 1:
            del data[place:]
        elif how == 2:
            data[place:place] = data[: draw(st.integers(0, len(data)))]
        else:
            del data[place : place + draw(st.integers(1, 8))]
    return bytes(data)


bodies = st.one_of(traces(), traces(), logs(), damaged(), damaged(), st.binary(max_size=200))


class Fuzzer:
    """Sends bodies and remembers what was taken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.taken: dict[tuple[str, bytes], int] = {}
        self.connection = http.client.HTTPConnection(urlsplit(world.stack.http).netloc, timeout=60)
        self.channel = grpc.insecure_channel(world.stack.grpc)

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        self.channel.close()

    def by_http(self, protocol: Protocol, body: bytes, content_type: str, encoding: str, packed: bool) -> None:
        """One POST."""
        sent = gzip.compress(body) if packed and encoding == "gzip" else body
        headers = {"Content-Type": content_type, **({"Content-Encoding": encoding} if encoding else {})}
        self.connection.request("POST", protocol.path, sent, headers)
        response = self.connection.getresponse()
        answer = response.read()
        assert response.status in HTTP_ANSWERS, f"{protocol.path} answered {response.status} to {headers} {sent.hex()}: {answer[:300]}"
        if response.status == 200 and content_type.endswith("protobuf") and (sent is body) == (not encoding):
            self.note(protocol, body, answer)

    def by_grpc(self, protocol: Protocol, body: bytes) -> None:
        """One call."""
        call = self.channel.unary_unary(protocol.method, request_serializer=None, response_deserializer=None)
        try:
            answer: bytes = call(body, timeout=60)
        except grpc.RpcError as error:
            failure: Any = error
            assert failure.code() in GRPC_ANSWERS, f"{protocol.method} answered {failure.code()} to {body.hex()}: {failure.details()}"
        else:
            self.note(protocol, body, answer)

    def note(self, protocol: Protocol, body: bytes, answer: bytes) -> None:
        """What was acked must be readable; the same bytes again are a resend."""
        if protocol.signal == "metrics":
            return
        request = protocol.request.FromString(body)
        refused = int(getattr(protocol.response.FromString(answer).partial_success, protocol.rejected))
        self.taken[protocol.signal, body] = _items(request) - refused


def _items(request: Any) -> int:
    if isinstance(request, ExportTraceServiceRequest):
        return sum(len(part.spans) for group in request.resource_spans for part in group.scope_spans)
    return sum(len(part.log_records) for group in request.resource_logs for part in group.scope_logs)


def send_garbage(fuzzer: Fuzzer, *, examples: int, chance: int) -> None:
    """Both ports, `examples` bodies each."""

    @seed(chance)
    @settings(
        max_examples=examples, deadline=None, database=None, verbosity=Verbosity.quiet, report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(
        protocol=st.sampled_from(PROTOCOLS), body=bodies, packed=st.booleans(),
        content_type=st.sampled_from(["application/x-protobuf"] * 4 + ["application/json", "text/plain", ""]),
        encoding=st.sampled_from(["", "", "", "gzip", "zstd", "deflate", "br"]),
    )  # fmt: skip
    def both(protocol: Protocol, body: bytes, packed: bool, content_type: str, encoding: str) -> None:
        fuzzer.by_http(protocol, body, content_type, encoding, packed)
        fuzzer.by_grpc(protocol, body)

    both()


async def fuzzed(world: World) -> None:
    """Hypothesis on both ports."""
    await world.start()
    fuzzer = Fuzzer(world)
    async with world.load("fuzz", senders=2, pause_seconds=0.05):
        try:
            await asyncio.to_thread(send_garbage, fuzzer, examples=world.amount(4000, 150), chance=world.chance.randrange(1 << 30))
        finally:
            fuzzer.close()
    expected: Counter[str] = Counter()
    for (signal, _), count in fuzzer.taken.items():
        expected[signal] += count
    async with world.stack.reader() as reader:
        await reader.barrier()
        for signal, sql in (
            ("traces", "SELECT count() AS n FROM otel_traces WHERE NOT startsWith(TraceId, '00000000000c4a05')"),
            ("logs", "SELECT count() AS n FROM otel_logs"),
        ):
            rows = int((await reader.query(sql))[0]["n"])
            world.expect(rows == expected[signal], f"of the {expected[signal]} {signal} that were taken {rows} are readable")
    kept = sorted((world.stack.settings.data_dir / "refused").glob("*.json"))
    world.expect(not kept, f"{len(kept)} requests were acked and then kept aside: {[path.read_text()[:300] for path in kept[:3]]}")
