"""Jaeger's remote storage on gRPC and its HTTP query API, on the port of a real `agl-otel store`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status, TracesData

from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.spans import LEFT_OUT, TRACE_SPANS, WARNINGS
from agl_otel_hook import conventions
from tests.contract.web.conftest import Web

READER, DEPENDENCIES = "/jaeger.storage.v2.TraceReader", "/jaeger.storage.v2.DependencyReader"
SECOND = 10**9


@dataclass(frozen=True)
class Sent:
    """A trace of one attempt: attempt span, agent, two model calls, a reward."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    service: str
    start: int


def pair(key: str, value: Any) -> KeyValue:
    match value:
        case bool():
            return KeyValue(key=key, value=AnyValue(bool_value=value))
        case int():
            return KeyValue(key=key, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=key, value=AnyValue(double_value=value))
        case list():
            return KeyValue(key=key, value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=each) for each in value])))
        case _:
            return KeyValue(key=key, value=AnyValue(string_value=value))


def post(web: Web, spans: dict[str, list[Span]]) -> None:
    """Send spans through the collector, as the given services."""
    request = ExportTraceServiceRequest()
    for service, some in spans.items():
        group = request.resource_spans.add()
        group.resource.attributes.append(pair("service.name", service))
        group.scope_spans.add().spans.extend(some)
    headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
    answer = web.call("POST", "/v1/traces", request.SerializeToString(), headers)
    assert answer.status == 200, answer.body


@pytest.fixture(scope="module")
def sent(web: Web) -> Sent:
    return send_trace(web)


def send_trace(web: Web, padding: int = 0) -> Sent:
    """Store the trace; `padding` adds so many characters, spread over about fifty more spans."""
    begun = web.rest("POST", "/rollouts", {"input": 1}).json
    rollout_id, attempt_id = begun["rollout_id"], begun["attempt"]["attempt_id"]
    trace_id, start, service = os.urandom(16), time.time_ns() - 10 * SECOND, f"agent-{os.urandom(4).hex()}"
    ids = [pair(conventions.ROLLOUT_ID, rollout_id), pair(conventions.ATTEMPT_ID, attempt_id)]

    def span(number: int, name: str, parent: int, seconds: float, *attributes: KeyValue, **fields: Any) -> Span:
        return Span(
            trace_id=trace_id,
            span_id=number.to_bytes(8, "big"),
            parent_span_id=parent.to_bytes(8, "big") if parent else b"",
            name=name,
            start_time_unix_nano=start + number,
            end_time_unix_nano=start + number + int(seconds * SECOND),
            attributes=[*ids, *attributes],
            **fields,
        )

    failed = Status(code=Status.STATUS_CODE_ERROR, message="no such tool")
    tokens = [pair(conventions.LLM_PROMPT_TOKEN_IDS, [1, 2, 3]), pair(conventions.LLM_RESPONSE_TOKEN_IDS, [4, 5])]
    reward = [pair(conventions.reward_name_key(0), "primary"), pair(conventions.reward_value_key(0), 0.5)]
    more = [span(number, "chat", 2, 0, pair("text", "long " * (padding // 250))) for number in range(6, 57 if padding else 6)]
    post(
        web,
        {
            service: [
                *more,
                span(1, conventions.SPAN_ATTEMPT, 0, 9),
                span(2, "invoke_agent", 1, 8, pair("team", "blue"), kind=Span.SPAN_KIND_SERVER),
                span(3, "execute_tool", 2, 1, kind=Span.SPAN_KIND_INTERNAL, status=failed),
            ],
            f"{service}-model": [
                span(4, conventions.SPAN_LLM, 2, 2.5, *tokens, kind=Span.SPAN_KIND_CLIENT),
                span(5, conventions.SPAN_ANNOTATION, 2, 0, *reward),
            ],
        },
    )
    return Sent(rollout_id, attempt_id, trace_id.hex(), service, start)


@pytest.fixture(scope="module")
def channel(web: Web) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(web.jaeger) as channel:  # with Jaeger's limit of 4 MiB on a message
        yield channel


def ask(channel: grpc.Channel, method: str, request: Any, answer: Any) -> Any:
    return channel.unary_unary(method, type(request).SerializeToString, answer.FromString)(request, timeout=120)


def traces(channel: grpc.Channel, method: str, request: Any) -> list[TracesData]:
    call = channel.unary_stream(f"{READER}/{method}", type(request).SerializeToString, TracesData.FromString)
    return list(call(request, timeout=120))


def found(channel: grpc.Channel, **query: Any) -> set[str]:
    """Return the ids of the traces that match."""
    asked = pb.FindTracesRequest(query=pb.TraceQueryParameters(**query))
    streamed = {span.trace_id.hex() for data in traces(channel, "FindTraces", asked) for span in spans_of(data)}
    ids = ask(channel, f"{READER}/FindTraceIDs", asked, pb.FindTraceIDsResponse)
    assert {each.trace_id.hex() for each in ids.trace_ids} == streamed
    return streamed


def spans_of(data: TracesData) -> list[Span]:
    return [span for group in data.resource_spans for scope in group.scope_spans for span in scope.spans]


def tags_of(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in span.attributes}


def text(key: str, value: str) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=key, value=pb.AnyValue(string_value=value))]


def test_services_and_operations_are_listed(channel: grpc.Channel, sent: Sent) -> None:
    services = ask(channel, f"{READER}/GetServices", pb.GetOperationsRequest(), pb.GetServicesResponse).services
    assert {sent.service, f"{sent.service}-model"} <= set(services)
    every = ask(channel, f"{READER}/GetOperations", pb.GetOperationsRequest(service=sent.service), pb.GetOperationsResponse).operations
    assert ("invoke_agent", "server") in {(each.name, each.span_kind) for each in every} and len(every) == 3
    servers = pb.GetOperationsRequest(service=sent.service, span_kind="server")
    assert [each.name for each in ask(channel, f"{READER}/GetOperations", servers, pb.GetOperationsResponse).operations] == ["invoke_agent"]


def test_a_trace_shows_ids_tokens_reward_and_verdict(channel: grpc.Channel, sent: Sent) -> None:
    query = [pb.GetTraceParams(trace_id=bytes.fromhex(sent.trace_id)), pb.GetTraceParams(trace_id=os.urandom(16))]
    data = traces(channel, "GetTraces", pb.GetTracesRequest(query=query))
    spans = {span.name: span for each in data for span in spans_of(each)}
    assert len(spans) == 5
    services = {
        each.value.string_value
        for one in data
        for group in one.resource_spans
        for each in group.resource.attributes
        if each.key == "service.name"
    }
    assert services == {sent.service, f"{sent.service}-model"}
    for span in spans.values():
        tags = tags_of(span)
        assert (tags[conventions.ROLLOUT_ID], tags[conventions.ATTEMPT_ID]) == (sent.rollout_id, sent.attempt_id) and tags[
            conventions.SEQUENCE_ID
        ] > 0
    head = tags_of(spans[conventions.SPAN_ATTEMPT])
    assert head["agentlightning.verdict"] in ("unproven", "incomplete") and head["agentlightning.reward.final"] == 0.5
    call = tags_of(spans[conventions.SPAN_LLM])
    assert (call["agentlightning.llm.prompt_tokens"], call["agentlightning.llm.response_tokens"]) == (3, 2)
    assert conventions.LLM_RESPONSE_TOKEN_IDS not in call and "agentlightning.verdict" not in call
    tool = spans["execute_tool"]
    assert (tool.status.code, tool.status.message, tool.parent_span_id) == (
        Status.STATUS_CODE_ERROR,
        "no such tool",
        (2).to_bytes(8, "big"),
    )
    assert spans["invoke_agent"].start_time_unix_nano == sent.start + 2


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"operation_name": "invoke_agent"},
        {"operation_name": "invoke_agent", "attributes": text("team", "blue")},
        {"attributes": text("span.kind", "server")},
        {"attributes": text("error", "true")},
        {"attributes": [pb.KeyValue(key="error", value=pb.AnyValue(bool_value=True))]},
        {"operation_name": "invoke_agent", "duration_min": {"seconds": 7}, "duration_max": {"seconds": 8}},
        {"search_depth": 1500},
    ],
)
def test_a_search_finds_a_trace_if_one_span_matches(channel: grpc.Channel, sent: Sent, query: dict[str, Any]) -> None:
    query = {"service_name": sent.service, **query}
    for name in ("duration_min", "duration_max"):
        if name in query:
            query[name] = query[name]["seconds"] * SECOND
    asked = pb.TraceQueryParameters(**{name: value for name, value in query.items() if not name.startswith("duration")})
    for name in ("duration_min", "duration_max"):
        if name in query:
            getattr(asked, name).FromNanoseconds(query[name])
    asked.start_time_min.FromNanoseconds(sent.start - SECOND)
    asked.start_time_max.FromNanoseconds(sent.start + 60 * SECOND)
    fields = {field.name: value for field, value in asked.ListFields()}
    assert found(channel, **fields) == {sent.trace_id}


@pytest.mark.parametrize(
    "query",
    [
        {"operation_name": "execute_tool", "attributes": text("team", "blue")},  # two spans of the trace, but no one span
        {"attributes": text("team", "red")},
        {"attributes": text(conventions.ROLLOUT_ID, "ro-nobody")},
        {"operation_name": "no such"},
    ],
)
def test_a_search_finds_nothing_if_no_single_span_matches(channel: grpc.Channel, sent: Sent, query: dict[str, Any]) -> None:
    assert found(channel, service_name=sent.service, **query) == set()


def test_a_rollout_is_found_by_its_id_alone(channel: grpc.Channel, sent: Sent) -> None:
    assert found(channel, attributes=text(conventions.ROLLOUT_ID, sent.rollout_id)) == {sent.trace_id}


def test_calls_between_services_are_counted(channel: grpc.Channel, sent: Sent) -> None:
    asked = pb.GetDependenciesRequest()
    asked.start_time.FromNanoseconds(sent.start - SECOND)
    asked.end_time.FromNanoseconds(sent.start + 60 * SECOND)
    links = ask(channel, f"{DEPENDENCIES}/GetDependencies", asked, pb.GetDependenciesResponse).dependencies
    assert (sent.service, f"{sent.service}-model", 2) in {(each.parent, each.child, each.call_count) for each in links}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"filter": b"\x0a\x00"}, "structured filters"),
        ({"search_depth": 5000}, "1500"),
        ({"attributes": [pb.KeyValue(key="a", value=pb.AnyValue(array_value=pb.ArrayValue()))]}, "text, a number"),
    ],
)
def test_an_unsupported_search_names_the_parameter(channel: grpc.Channel, query: dict[str, Any], says: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        found(channel, **query)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and says in str(refused.value.details())  # pyright: ignore[reportAttributeAccessIssue]  # a failed call is also a grpc.Call


def test_a_trace_of_ten_megabytes_is_split_into_messages_jaeger_accepts(web: Web, channel: grpc.Channel) -> None:
    trace_id, now = os.urandom(16), time.time_ns()
    message = "a long message " * 3500  # 50 KB
    spans = [
        Span(trace_id=trace_id, span_id=number.to_bytes(8, "big"), name="chat", start_time_unix_nano=now, end_time_unix_nano=now,
             attributes=[pair("gen_ai.input.messages", f"{number} {message}")])
        for number in range(1, 201)
    ]  # fmt: skip
    post(web, {"large": spans})
    data = traces(channel, "GetTraces", pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=trace_id)]))
    assert sum(len(spans_of(each)) for each in data) == 200 and sum(each.ByteSize() for each in data) > 10_000_000
    assert len(data) > 1 and max(each.ByteSize() for each in data) < 4 << 20
    assert all(span.trace_id == trace_id for each in data for span in spans_of(each))
    shown = web.call("GET", f"/api/traces/{trace_id.hex()}").json["data"][0]
    assert len(shown["spans"]) == 200 and shown["processes"]["p1"]["serviceName"] == "large"


def test_a_span_larger_than_a_message_is_truncated_and_marked(web: Web, channel: grpc.Channel) -> None:
    trace_id, now, book = os.urandom(16), time.time_ns(), "é" * 3_000_000  # 6 MB
    span = Span(
        trace_id=trace_id, span_id=b"12345678", name="chat", start_time_unix_nano=now, end_time_unix_nano=now,
        attributes=[pair("gen_ai.input.messages", book), pair("gen_ai.request.model", "policy")],
    )  # fmt: skip
    post(web, {"book": [span]})
    (data,) = traces(channel, "GetTraces", pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=trace_id)]))
    (found,) = spans_of(data)
    tags = {each.key: each.value.string_value for each in found.attributes}
    assert data.ByteSize() < 4 << 20 and tags["gen_ai.request.model"] == "policy"
    assert tags["gen_ai.input.messages"].startswith("éé") and tags["gen_ai.input.messages"].endswith("(cut)")
    assert "long texts in it are cut" in tags[conventions.SHOWN_CUT]
    whole = web.call("GET", f"/api/traces/{trace_id.hex()}").json["data"][0]["spans"][0]["tags"]
    assert book in [each["value"] for each in whole], "HTTP has no such limit"


def test_a_very_long_trace_is_cut_to_its_first_spans_with_a_warning(web: Web, channel: grpc.Channel) -> None:
    trace_id, now, count = os.urandom(16), time.time_ns(), TRACE_SPANS + 500
    spans = [
        Span(
            trace_id=trace_id,
            span_id=number.to_bytes(8, "big"),
            name="step",
            start_time_unix_nano=now + number,
            end_time_unix_nano=now + 10**9,
        )
        for number in range(1, count + 1)
    ]
    for first in range(0, count, 5_000):
        post(web, {"endless": spans[first : first + 5_000]})
    small = send_trace(web)
    ids = [bytes.fromhex(small.trace_id), trace_id, bytes(15) + b"\1"]
    data = traces(channel, "GetTraces", pb.GetTracesRequest(query=[pb.GetTraceParams(trace_id=each) for each in ids]))
    of_trace = {each: [span for part in data for span in spans_of(part) if span.trace_id == each] for each in ids}
    assert sum(map(len, of_trace.values())) == sum(len(spans_of(each)) for each in data)
    assert of_trace[ids[0]] and not of_trace[ids[2]]
    shown = of_trace[trace_id]
    assert len(shown) == TRACE_SPANS and max(int.from_bytes(span.span_id, "big") for span in shown) == TRACE_SPANS
    warnings = [[value.string_value for value in each.value.array_value.values] for each in shown[0].attributes if each.key == WARNINGS]
    assert warnings == [[LEFT_OUT]]
    assert web.call("GET", f"/api/traces/{trace_id.hex()}").json["data"][0]["warnings"] == [LEFT_OUT]


def test_a_search_without_times_finds_traces_before_its_first_window(web: Web, channel: grpc.Channel) -> None:
    service, now = f"slow-{os.urandom(4).hex()}", time.time_ns()
    ages = {os.urandom(16): age for age in (1, 3600, 12 * 3600)}
    for trace_id, age in ages.items():
        start = now - age * SECOND
        span = Span(trace_id=trace_id, span_id=b"12345678", name="work", start_time_unix_nano=start, end_time_unix_nano=start)
        post(web, {service: [span]})
    asked = {depth: pb.TraceQueryParameters(service_name=service, search_depth=depth) for depth in (1, 2, 3)}
    for depth, query in asked.items():
        ids = ask(channel, f"{READER}/FindTraceIDs", pb.FindTracesRequest(query=query), pb.FindTraceIDsResponse).trace_ids
        assert [each.trace_id for each in ids] == [*ages][:depth]


# --- over HTTP


def test_the_older_api_has_the_format_of_jaegers_ui(web: Web, sent: Sent) -> None:
    assert sent.service in web.call("GET", "/api/services").json["data"]
    names = web.call("GET", f"/api/services/{quote(sent.service)}/operations").json["data"]
    assert names == sorted([conventions.SPAN_ATTEMPT, "execute_tool", "invoke_agent"])
    assert {"name": "invoke_agent", "spanKind": "server"} in web.call("GET", f"/api/operations?service={sent.service}").json["data"]
    trace = web.call("GET", f"/api/traces/{sent.trace_id}").json["data"][0]
    spans = {span["operationName"]: span for span in trace["spans"]}
    agent, tool = spans["invoke_agent"], spans["execute_tool"]
    assert agent["references"] == [{"refType": "CHILD_OF", "traceID": sent.trace_id, "spanID": f"{1:016x}"}]
    assert (agent["startTime"], agent["duration"]) == ((sent.start + 2) // 1000, 8_000_000)
    assert trace["processes"][agent["processID"]]["serviceName"] == sent.service
    assert {"key": "team", "type": "string", "value": "blue"} in agent["tags"]
    assert {"key": "error", "type": "bool", "value": True} in tool["tags"]
    assert {"key": conventions.ROLLOUT_ID, "type": "string", "value": sent.rollout_id} in tool["tags"]


@pytest.mark.parametrize(
    "query",
    [
        {"tags": json.dumps({"team": "blue"})},
        {"tag": "team:blue"},
        {"operation": "execute_tool", "minDuration": "900ms", "maxDuration": "1.5s"},
        {"start": "SENT", "limit": 1},
    ],
)
def test_the_older_api_searches(web: Web, sent: Sent, query: dict[str, Any]) -> None:
    query = {name: sent.start // 1000 - 1 if value == "SENT" else value for name, value in query.items()}
    answer = web.call("GET", f"/api/traces?{urlencode({'service': sent.service, **query})}")
    assert [trace["traceID"] for trace in answer.json["data"]] == [sent.trace_id], answer.body


def test_version_3_answers_in_otlp_as_json(web: Web, sent: Sent) -> None:
    assert sent.service in web.call("GET", "/api/v3/services").json["services"]
    found = web.call("GET", f"/api/v3/operations?service={sent.service}&span_kind=server").json
    assert found == {"operations": [{"name": "invoke_agent", "spanKind": "server"}]}
    after = datetime.fromtimestamp(sent.start / SECOND - 5, UTC).isoformat().replace("+00:00", "Z")
    query = {"query.service_name": sent.service, "query.start_time_min": after, "query.attributes": json.dumps({"team": "blue"})}
    for path in (f"/api/v3/traces/{sent.trace_id}", f"/api/v3/traces?{urlencode(query)}"):
        answer = web.call("GET", path)
        assert answer.status == 200, answer.body
        spans = [span for group in answer.json["result"]["resourceSpans"] for scope in group["scopeSpans"] for span in scope["spans"]]
        assert {span["traceId"] for span in spans} == {sent.trace_id} and len(spans) == 5
        assert {span["spanId"] for span in spans} == {f"{number:016x}" for number in range(1, 6)}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        (f"/api/traces/{'0' * 31}1", 404, "trace not found"),
        ("/api/traces/no-hex", 400, "32 hex digits"),
        ("/api/traces", 400, "'service' is required"),
        ("/api/traces?service=a&limit=0", 400, "1 to 1500"),
        ("/api/traces?service=a&minDuration=soon", 400, "like 1.5s"),
        (f"/api/traces?service=a&minDuration={'9' * 400}s", 400, "like 1.5s"),
        ("/api/traces?service=a&tags=%7B", 400, "not JSON"),
        (f"/api/traces?service=a&tags=%7B%22a%22:{'9' * 5000}%7D", 400, "not JSON"),
        (f"/api/traces?service=a&tags={'[' * 5000}", 400, "not JSON"),
        ("/api/v3/traces?query.start_time_min=yesterday", 400, "time like"),
        ("/api/v3/traces?query.service_name=nobody", 404, "no traces"),
        ("/api/operations", 400, "'service' is required"),
    ],
)
def test_an_invalid_query_names_its_parameter(web: Web, path: str, status: int, says: str) -> None:
    answer = web.call("GET", path)
    assert answer.status == status and says in answer.json["errors"][0]["msg"], answer.body
