"""An agent with an attempt's key can only send data of that attempt, whatever ids it sends; checked against the stored rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing

import aiohttp
import grpc.aio
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import SecretStr

from agl_otel.collector.grpc_port import METHODS
from agl_otel.collector.identify import FEEDBACK, GIVEN, KEY, PROXY, STEP, TRAINING
from agl_otel.net.auth import attempt_ingest_key, ingest_key
from agl_otel_hook import conventions

from .otlp import request_of, span
from .stack import Stack, new_stack, start

TOKEN = "s3cret"
MINE = attempt_ingest_key(TOKEN, "ro-mine", "at-mine")
FORGED = MINE.replace("mine", "theirs")
THEIRS = {conventions.ROLLOUT_ID: "ro-theirs", conventions.ATTEMPT_ID: "at-theirs"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack with a token: each test looks at traces of its own."""
    with closing(new_stack(tmp_path_factory.mktemp("closed"))) as made:
        made.settings.token = SecretStr(TOKEN)
        asyncio.run(start(made))
        yield made


async def post(stack: Stack, path: str, body: bytes, *keys: str) -> tuple[int, bytes]:
    """POST with an Authorization header for each key."""
    sent = [("Content-Type", "application/x-protobuf"), (conventions.HEADER_ACK, "stored")]
    sent += [("Authorization", f"Bearer {key}") for key in keys]
    async with aiohttp.ClientSession() as session, session.post(f"{stack.http}{path}", data=body, headers=sent) as answer:
        return answer.status, await answer.read()


async def send(stack: Stack, request: ExportTraceServiceRequest, *keys: str, over: str) -> ExportTraceServiceResponse:
    if over == "http":
        status, body = await post(stack, "/v1/traces", request.SerializeToString(), *keys)
        assert status == 200, body
        return ExportTraceServiceResponse.FromString(body)
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=ExportTraceServiceResponse.FromString)
        given = [("authorization", f"Bearer {key}") for key in keys]
        return await call(request.SerializeToString(), metadata=[*given, (conventions.HEADER_ACK, "stored")])


async def stored(stack: Stack, spans: Sequence[Span]) -> list[tuple[str, str]]:
    async with stack.reader() as reader:
        rows = await reader.query("SELECT TraceId, RolloutId, AttemptId FROM otel_traces")
    found = {row["TraceId"]: (row["RolloutId"], row["AttemptId"]) for row in rows}
    return [found.get(span.trace_id.hex(), ("-", "-")) for span in spans]


async def rejected(stack: Stack) -> int:
    """Return how many spans the collector has rejected so far."""
    given = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.get(f"{stack.http}/health", headers=given) as health:
        return (await health.json()).get("rejected", 0)


async def test_spans_of_other_attempts_are_refused_and_spans_without_ids_are_the_attempts(closed: Stack) -> None:
    before = await rejected(closed)
    for over in ("http", "grpc"):
        spans = [
            span(),
            span("work", {conventions.ROLLOUT_ID: "ro-mine", conventions.ATTEMPT_ID: "at-mine"}),
            span("work", THEIRS),
            span("work", {conventions.ROLLOUT_ID: "ro-mine", conventions.ATTEMPT_ID: "at-other"}),
            span(conventions.SPAN_ATTEMPT, THEIRS),
            span("agentlightning.llm", THEIRS),
        ]
        answer = await send(closed, request_of(spans), MINE, over=over)
        assert answer.partial_success.rejected_spans == 4 and KEY in answer.partial_success.error_message
        assert await stored(closed, spans) == [("ro-mine", "at-mine")] * 2 + [("-", "-")] * 4
    assert await rejected(closed) - before == 8


@pytest.mark.parametrize("over", ["http", "grpc"])
@pytest.mark.parametrize("second", ["x", FORGED, attempt_ingest_key("another", "ro-mine", "at-mine")])
async def test_a_key_stays_bound_whatever_is_sent_beside_it(second: str, over: str, closed: Stack) -> None:
    mine = {conventions.ROLLOUT_ID: "ro-mine", conventions.ATTEMPT_ID: "at-mine"}
    spans = [span("work", THEIRS), span(conventions.SPAN_ANNOTATION, {**mine, conventions.REWARD_GIVEN: True}), span()]
    answer = await send(closed, request_of(spans), MINE, second, over=over)
    assert answer.partial_success.rejected_spans == 2
    assert await stored(closed, spans) == [("-", "-"), ("-", "-"), ("ro-mine", "at-mine")]
    if over == "http":
        assert (await post(closed, "/v1/traces", request_of(spans).SerializeToString(), second, MINE))[0] == 401
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            await send(closed, request_of(spans), second, MINE, over=over)


async def test_without_the_token_health_says_only_whether_all_is_well(closed: Stack) -> None:
    for given in ({}, {"Authorization": f"Bearer {MINE}"}, {"Authorization": "Bearer junk"}):
        async with aiohttp.ClientSession() as session, session.get(f"{closed.http}/health", headers=given) as health:
            assert (health.status, await health.json()) == (200, {"status": "ok"})


async def test_a_key_changes_nothing_in_the_trace_of_another_attempt(closed: Stack) -> None:
    """Spans without ids belong to the attempt if they have its key; those with a key of several attempts get the ids of their trace."""
    theirs, mine = (
        attempt_ingest_key(TOKEN, "ro-theirs", "at-theirs"),
        {conventions.ROLLOUT_ID: "ro-mine", conventions.ATTEMPT_ID: "at-mine"},
    )
    opening = span(conventions.SPAN_ATTEMPT, THEIRS)
    trace = opening.trace_id
    await send(closed, request_of([opening]), TOKEN, over="http")
    claimed = span("work", mine, trace=trace)
    hijack = [span(conventions.SPAN_ATTEMPT, mine, trace=trace), claimed, span(trace=trace, parent=opening.span_id)]
    assert not (await send(closed, request_of(hijack), MINE, over="http")).partial_success.rejected_spans
    for over, key in (("http", theirs), ("grpc", theirs), ("http", ingest_key(TOKEN)), ("grpc", TOKEN)):
        spans = [span(trace=trace, parent=parent) for parent in (opening.span_id, claimed.span_id)]
        assert not (await send(closed, request_of(spans), key, over=over)).partial_success.rejected_spans
    async with closed.reader() as reader:
        rows = await reader.query(f"SELECT SpanId, RolloutId FROM otel_traces WHERE TraceId = '{trace.hex()}'")
    assert {row["SpanId"] for row in rows if row["RolloutId"] == "ro-mine"} == {each.span_id.hex() for each in hijack}
    assert sum(row["RolloutId"] == "ro-theirs" for row in rows) == len(rows) - len(hijack) == 9


async def test_a_request_refused_with_one_key_is_accepted_with_another(closed: Stack) -> None:
    request = request_of([span("work", THEIRS)])
    assert (await send(closed, request, MINE, over="http")).partial_success.rejected_spans == 1
    theirs = attempt_ingest_key(TOKEN, "ro-theirs", "at-theirs")
    assert not (await send(closed, request, theirs, over="http")).partial_success.rejected_spans, "it is no resend"


def points_of_the_stack() -> list[tuple[str, Span]]:
    """Spans that only services of the stack send, each with the reason for which it is refused from others."""
    annotation = conventions.SPAN_ANNOTATION
    return [
        (PROXY, span(conventions.SPAN_LLM)),
        (PROXY, span("work", {conventions.LLM_CALL: 1})),
        (PROXY, span("work", {conventions.LLM_RESPONSE_TOKEN_IDS: 7})),
        (STEP, span(conventions.SPAN_TRAIN_STEP)),
        (STEP, span(conventions.SPAN_TRAIN_EVIDENCE)),
        (STEP, span("work", {conventions.TRAIN_RUN: "run"})),
        (GIVEN, span(annotation, {conventions.reward_name_key(0): "r", conventions.REWARD_GIVEN: True})),
    ]


def points_of_agents() -> list[Span]:
    """Spans that the hook, emitters and engines send from the agent's process."""
    seal = {conventions.SEAL_SPANS: 1, conventions.SEAL_DROPPED: 0, conventions.SEAL_CLOSING: True}
    return [
        span(conventions.SPAN_ANNOTATION, {conventions.reward_name_key(0): "r", conventions.reward_value_key(0): 1}),
        span("chat m", {"gen_ai.operation.name": "chat", "prompt_token_ids": 1, "response_token_ids": 2, conventions.LATE: True}),
        span(conventions.SPAN_SEAL, {conventions.PROCESS: "m", **seal}),
        *(span(name) for name in (conventions.SPAN_OPERATION, conventions.SPAN_MESSAGE, conventions.SPAN_OBJECT, conventions.SPAN_VIRTUAL)),
    ]


@pytest.mark.parametrize("over", ["http", "grpc"])
@pytest.mark.parametrize("key", [MINE, ingest_key(TOKEN)], ids=["of an attempt", "of no attempt"])
async def test_spans_of_the_stacks_services_are_refused_with_an_agents_key(key: str, over: str, closed: Stack) -> None:
    reasons, forged = zip(*points_of_the_stack(), strict=True)
    answer = await send(closed, request_of([*forged, *(own := points_of_agents())], THEIRS if key != MINE else {}), key, over=over)
    assert answer.partial_success.rejected_spans == len(forged)
    assert all(f"{reasons.count(reason)} × {reason}" in answer.partial_success.error_message for reason in (PROXY, STEP, GIVEN))
    assert await stored(closed, forged) == [("-", "-")] * len(forged)
    assert await stored(closed, own) == [("ro-mine", "at-mine") if key == MINE else ("ro-theirs", "at-theirs")] * len(own)


async def test_services_of_the_stack_send_their_spans_with_the_token(closed: Stack) -> None:
    spans = [each for _, each in points_of_the_stack()]
    answer = await send(closed, request_of(spans), TOKEN, over="http")
    assert not answer.partial_success.rejected_spans and await stored(closed, spans) == [("", "")] * len(spans)


async def test_log_records_are_checked_against_the_key(closed: Stack) -> None:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    for text, ids in (("mine", {}), ("theirs", THEIRS)):
        record = records.add(time_unix_nano=span().start_time_unix_nano)
        record.body.string_value = text
        record.attributes.extend(span("", ids).attributes)
    status, body = await post(closed, "/v1/logs", request.SerializeToString(), MINE)
    assert status == 200 and ExportLogsServiceResponse.FromString(body).partial_success.rejected_log_records == 1
    async with closed.reader() as reader:
        rows = await reader.query("SELECT Body, RolloutId, AttemptId FROM otel_logs")
    assert rows == [{"Body": "mine", "RolloutId": "ro-mine", "AttemptId": "at-mine"}]


@pytest.mark.parametrize("key", [MINE, ingest_key(TOKEN), TOKEN], ids=["of an attempt", "of no attempt", "of the stack"])
async def test_feedback_is_refused_with_an_agents_key(key: str, closed: Stack) -> None:
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=span().start_time_unix_nano)
    record.body.string_value = f"by {key}"
    record.attributes.extend(span("", {conventions.FEEDBACK_SOURCE: "a person"}).attributes)
    status, body = await post(closed, "/v1/logs", request.SerializeToString(), key)
    answer = ExportLogsServiceResponse.FromString(body).partial_success
    assert status == 200 and answer.error_message == ("" if key == TOKEN else f"1 × {FEEDBACK}")
    async with closed.reader() as reader:
        rows = await reader.query("SELECT count() AS Count FROM otel_logs WHERE Body = {text:String}", params={"text": f"by {key}"})
    assert [int(row["Count"]) for row in rows] == [int(key == TOKEN)]


def points(**names: dict[str, str]) -> bytes:
    """Build a request with a gauge of each name, with the ids on its resource."""
    request = ExportMetricsServiceRequest()
    for name, ids in names.items():
        group = request.resource_metrics.add()
        group.resource.attributes.extend(span("", ids).attributes)
        group.scope_metrics.add().metrics.add(name=name).gauge.data_points.add(as_int=1, time_unix_nano=span().end_time_unix_nano)
    return request.SerializeToString()


async def send_points(stack: Stack, body: bytes, key: str, *, over: str) -> tuple[int, str]:
    """Send points; return the number rejected, and the message."""
    if over == "http":
        status, answer = await post(stack, "/v1/metrics", body, key)
        assert status == 200, answer
    else:
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            call = channel.unary_unary(METHODS[2], request_serializer=None, response_deserializer=None)
            answer = await call(body, metadata=[("authorization", f"Bearer {key}"), (conventions.HEADER_ACK, "stored")])
    outcome = ExportMetricsServiceResponse.FromString(answer).partial_success
    return outcome.rejected_data_points, outcome.error_message


async def test_points_of_other_attempts_are_refused_and_those_without_ids_are_its_own(closed: Stack) -> None:
    for over in ("http", "grpc"):
        body = points(**{f"mine_{over}": {}, f"theirs_{over}": THEIRS, "agl.training.stale_share": {}})
        refused, why = await send_points(closed, body, MINE, over=over)
        assert refused == 2 and KEY in why and TRAINING in why
        assert (await send_points(closed, body, ingest_key(TOKEN), over=over))[0] == 1, "of the key of no attempt, figures of training"
        assert (await send_points(closed, body, TOKEN, over=over)) == (0, ""), "it is no resend"
    async with closed.reader() as reader:
        rows = await reader.query("SELECT MetricName AS m, RolloutId AS r, AttemptId AS a FROM otel_metrics_gauge ORDER BY m, r")
    stored = [(row["m"], row["r"], row["a"]) for row in rows if not row["m"].startswith("agl.training.")]
    mine = [(f"mine_{over}", *ids) for over in ("grpc", "http") for ids in (("", ""), ("", ""), ("ro-mine", "at-mine"))]
    assert stored == mine + [(f"theirs_{over}", "ro-theirs", "at-theirs") for over in ("grpc", "http") for _ in range(2)]
    assert len(rows) - len(stored) == 2, "the trainer's alone"


async def test_a_forged_key_and_all_other_ports_are_refused(closed: Stack) -> None:
    body = request_of([span()]).SerializeToString()
    for key in (FORGED, MINE[:-1], MINE + "0", MINE.replace("aglo-", "agl-"), "aglo-", "aglo-ro-mine/at-mine"):
        assert (await post(closed, "/v1/traces", body, key))[0] == 401, key
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await send(closed, request_of([span()]), key, over="grpc")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for path in ("/barrier", "/delete", "/purge", "/copy", "/maintain"):
        assert (await post(closed, path, b"{}", MINE))[0] == 401, path
