"""A refusal by a limit names the limit, and its setting if it has one."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agl_otel.collector.grpc_port import METHODS, TRANSPORT_PERCENT
from agl_otel.collector.scan import MAX_SPAN_TOKENS
from agl_otel_hook import conventions

from .otlp import post_spans, request_of, span, span_request
from .stack import Stack, until

HEADERS = {"Content-Type": "application/x-protobuf"}


async def refusal(stack: Stack, body: bytes, **headers: str) -> tuple[int, str, str]:
    """Return (HTTP status, message, Retry-After) of a refused request."""
    sent = {**HEADERS, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with aiohttp.ClientSession() as session, session.post(f"{stack.http}/v1/traces", data=body, headers=sent) as response:
        status = Status.FromString(await response.read())
        return response.status, status.message, response.headers.get("Retry-After", "")


async def grpc_refusal(stack: Stack, body: bytes) -> grpc.aio.AioRpcError:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.grpc, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            call = channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)
            await call(body, compression=grpc.Compression.Gzip)
    return failure.value


async def test_a_message_above_the_limit_is_refused_on_every_transport(own_stack: Stack) -> None:
    own_stack.settings.max_message_bytes = 100_000
    await own_stack.start_collector()
    large = bytes(100_001)
    for body, encoding in ((large, "identity"), (gzip.compress(large), "gzip")):
        status, message, _ = await refusal(own_stack, body, Content_Encoding=encoding)
        assert (status, "AGL_MAX_MESSAGE_BYTES" in message) == (413, True)
    refused = await grpc_refusal(own_stack, large)
    assert (refused.code(), "AGL_MAX_MESSAGE_BYTES" in (refused.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    refused = await grpc_refusal(own_stack, bytes(TRANSPORT_PERCENT * 1000 + 1))
    assert (refused.code(), "larger than max" in (refused.details() or "")) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert (await refusal(own_stack, b"\xff" * 100_000))[0] == 400


async def test_a_span_with_too_many_attributes_is_refused_alone(own_stack: Stack) -> None:
    own_stack.settings.max_span_attributes = 20
    await own_stack.start_queue()
    await own_stack.start_collector()
    wide = span("wide", {f"key-{n}": n for n in range(20)})
    answer = await post_spans(own_stack, request_of([span(), wide], {conventions.ROLLOUT_ID: "ro-1"}), ack="stored")
    assert (answer.partial_success.rejected_spans, "AGL_MAX_SPAN_ATTRIBUTES" in answer.partial_success.error_message) == (1, True)
    async with own_stack.reader() as reader:
        assert len(await reader.spans(["ro-1"])) == 1


@pytest.mark.full
async def test_a_log_at_its_budget_asks_for_a_retry_and_loses_nothing(own_stack: Stack) -> None:
    own_stack.settings.wal_budget_bytes = 1 << 20
    await own_stack.start_collector()  # no queue: nothing can be numbered, so everything stays in the log
    body = {"text": "x" * 100_000}
    for _ in range(11):
        await post_spans(own_stack, request_of([span("work", body)], {conventions.ROLLOUT_ID: "ro-1"}))
    more = request_of([span("work", body)], {conventions.ROLLOUT_ID: "ro-1"})
    status, message, retry_after = await refusal(own_stack, more.SerializeToString())
    assert (status, retry_after, "AGL_WAL_BUDGET_BYTES" in message) == (503, "1", True)
    error = await grpc_refusal(own_stack, more.SerializeToString())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    trailing: Any = error.trailing_metadata()
    retry = RetryInfo()
    assert Status.FromString(dict(trailing)["grpc-status-details-bin"]).details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 1
    log = own_stack.log.read_text()
    assert "% of its budget" in log
    assert "all of its budget" in log
    await own_stack.start_queue()

    async def taken() -> bool:
        return (await refusal_or_none(own_stack, more.SerializeToString())) == 200

    async with own_stack.reader() as reader:
        await reader.barrier()
        (row,) = await reader.query("SELECT count() AS n FROM otel_traces")
        assert row["n"] == 11
    await until(taken, bool)


async def refusal_or_none(stack: Stack, body: bytes) -> int:
    async with aiohttp.ClientSession() as session, session.post(f"{stack.http}/v1/traces", data=body, headers=HEADERS) as response:
        return response.status


async def test_a_nearly_full_disk_is_reported(own_stack: Stack) -> None:
    own_stack.settings.disk_reserve_bytes = 1 << 60
    await own_stack.start_collector()
    status, message, _ = await refusal(own_stack, span_request([("ro-1", "at-1")], spans=1).SerializeToString())
    assert (status, "AGL_DISK_RESERVE_BYTES" in message) == (503, True)


@pytest.mark.full
async def test_concurrent_requests_are_limited_and_all_accepted_in_the_end(own_stack: Stack) -> None:
    own_stack.settings.max_in_flight_bytes = 4096
    await own_stack.start_queue()
    await own_stack.start_collector()
    told_to_wait = 0

    async def send(number: int) -> None:
        nonlocal told_to_wait
        body = request_of([span("work", {"text": "x" * 3000})], {conventions.ROLLOUT_ID: f"ro-{number}"}).SerializeToString()
        while (status := await refusal_or_none(own_stack, body)) == 503:
            told_to_wait += 1
            await asyncio.sleep(0.01)
        assert status == 200

    await asyncio.gather(*(send(number) for number in range(30)))
    assert told_to_wait > 0
    async with own_stack.reader() as reader:
        await reader.barrier()
        assert (await reader.query("SELECT uniq(RolloutId) AS n FROM otel_traces"))[0]["n"] == 30


async def test_the_announced_size_of_a_stalled_body_turns_no_request_away(own_stack: Stack) -> None:
    own_stack.settings.max_in_flight_bytes = 4096
    await own_stack.start_queue()
    await own_stack.start_collector()
    body = request_of([span()], {conventions.ROLLOUT_ID: "ro-1"}).SerializeToString()
    length = len(body) + 60_000_000
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\nContent-Length: {length}\r\n\r\n"
    stalled = [await asyncio.open_connection("127.0.0.1", own_stack.settings.otlp_http_port) for _ in range(3)]
    for _, writer in stalled:
        writer.write(head.encode() + b"x")
        await writer.drain()
    for number in range(20):
        assert (
            await refusal_or_none(own_stack, request_of([span(f"n-{number}")], {conventions.ROLLOUT_ID: "ro-1"}).SerializeToString()) == 200
        )
    for _, writer in stalled:
        writer.close()
        await writer.wait_closed()


async def test_a_request_whose_rows_would_be_too_large_is_refused_and_others_are_taken(own_stack: Stack) -> None:
    own_stack.settings.max_expanded_bytes = 1 << 20
    await own_stack.start_queue()
    await own_stack.start_collector()
    wide = {conventions.ROLLOUT_ID: "ro-1", "pad": "x" * 50_000}
    status, message, _ = await refusal(own_stack, request_of([span() for _ in range(50)], wide).SerializeToString())
    assert (status, "AGL_MAX_EXPANDED_BYTES" in message) == (400, True)
    failure = await grpc_refusal(own_stack, request_of([span() for _ in range(50)], wide).SerializeToString())
    assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
    await post_spans(own_stack, request_of([span() for _ in range(10)], wide), ack="stored")
    async with own_stack.reader() as reader:
        assert len(await reader.spans(["ro-1"])) == 10


@pytest.mark.full
async def test_a_span_with_too_many_token_ids_is_refused_alone(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    longest, longer = (span("call", {conventions.LLM_PROMPT_TOKEN_IDS: [7] * count}) for count in (MAX_SPAN_TOKENS, MAX_SPAN_TOKENS + 1))
    answer = await post_spans(own_stack, request_of([longest, longer], {conventions.ROLLOUT_ID: "ro-1"}), ack="stored")
    assert (answer.partial_success.rejected_spans, f"more than {MAX_SPAN_TOKENS} token ids" in answer.partial_success.error_message) == (
        1,
        True,
    )
    async with own_stack.reader() as reader:
        assert len(await reader.spans(["ro-1"])) == 1
