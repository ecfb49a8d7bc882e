"""OTLP requests as clients send them."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Mapping, Sequence

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel_hook import conventions

from .stack import Stack

Value = str | bool | int | float | bytes | Sequence[int] | Sequence[float] | Sequence[str]
_counter = itertools.count(1)


def any_value(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))


def attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def span(name: str = "work", values: Mapping[str, Value] | None = None, *, trace: bytes = b"", parent: bytes = b"") -> Span:
    now = time.time_ns()
    return Span(
        trace_id=trace or os.urandom(16),
        span_id=os.urandom(8),
        parent_span_id=parent,
        name=name,
        start_time_unix_nano=now - 1000,
        end_time_unix_nano=now,
        attributes=attributes({"n": next(_counter), **(values or {})}),
    )


def request_of(spans: Sequence[Span], resource: Mapping[str, Value] | None = None) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(attributes(resource or {}))
    group.scope_spans.add().spans.extend(spans)
    return request


def span_request(attempts: Sequence[tuple[str, str]], *, spans: int) -> ExportTraceServiceRequest:
    """Build a request with `spans` spans for each attempt, ids on the resource."""
    request = ExportTraceServiceRequest()
    for rollout_id, attempt_id in attempts:
        made = request_of([span() for _ in range(spans)], {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id})
        request.resource_spans.extend(made.resource_spans)
    return request


async def post_spans(
    stack: Stack, request: ExportTraceServiceRequest, *, ack: str = "durable", **headers: str
) -> ExportTraceServiceResponse:
    async with aiohttp.ClientSession() as session:
        return await post_on(session, stack, request, ack=ack, **headers)


async def post_on(
    session: aiohttp.ClientSession, stack: Stack, request: ExportTraceServiceRequest, *, ack: str = "durable", **headers: str
) -> ExportTraceServiceResponse:
    sent = {
        "Content-Type": "application/x-protobuf",
        conventions.HEADER_ACK: ack,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    body = io.BytesIO(request.SerializeToString())  # aiohttp warns about large bodies passed as bytes
    async with session.post(f"{stack.http}/v1/traces", data=body, headers=sent) as response:
        answer = await response.read()
        assert response.status == 200, answer
        return ExportTraceServiceResponse.FromString(answer)
