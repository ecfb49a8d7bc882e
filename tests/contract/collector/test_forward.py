"""Copies to the user's own endpoint: they have the user's bytes and delay no ack, whatever the endpoint does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.collector.forward import Forwarder, make_target
from agl_otel.errors import SettingsError
from agl_otel.settings import free_port, parse_headers
from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver

from .otlp import post_spans, request_of, span, span_request
from .stack import Stack, new_stack, until
from .test_metrics import by_hand


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    made = OtlpReceiver()
    yield made
    await asyncio.to_thread(made.close)


async def start_forwarding(stack: Stack, endpoint: str, headers: str = "") -> None:
    secret = type(stack.settings.forward_headers)
    stack.settings = stack.settings.model_copy(update={"forward_otlp": endpoint, "forward_headers": secret(headers)})
    await stack.start_queue()
    await stack.start_collector()


async def forwarded(stack: Stack) -> dict[str, int]:
    """Return {outcome: requests}."""
    async with aiohttp.ClientSession() as session, session.get(f"{stack.http}/status") as response:
        metrics: dict[str, Any] = (await response.json())["metrics"]
    return {point["attributes"]["outcome"]: point["value"] for point in metrics.get("agl.collector.forwarded", ())}


async def test_every_accepted_request_is_copied_unchanged(own_stack: Stack, receiver: OtlpReceiver) -> None:
    await start_forwarding(own_stack, receiver.http_url, "x-key=a%20b, Other=c")
    request = request_of([span(), span("work", {conventions.ROLLOUT_ID: "no good"})])
    await post_spans(own_stack, request, agl_rollout_id="ro-1", agl_attempt_id="at-1")
    await post_spans(own_stack, request, agl_rollout_id="ro-1", agl_attempt_id="at-1")  # a resend is not copied again
    metrics = by_hand("copied").SerializeToString()
    headers = {"Content-Type": "application/x-protobuf"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{own_stack.http}/v1/metrics", data=metrics, headers=headers) as response:
            assert response.status == 200
        async with session.post(f"{own_stack.http}/v1/logs", data=b"\xff", headers=headers) as response:
            assert response.status == 400
    await until(lambda: forwarded(own_stack), lambda now: now == {"sent": 2})
    found = {path: (body, sent) for path, body, sent in receiver.bodies}
    assert set(found) == {"/v1/traces", "/v1/metrics"}
    body, sent = found["/v1/traces"]
    assert body == request.SerializeToString()
    assert (sent["x-key"], sent["other"]) == ("a b", "c")
    assert not any(name.startswith("agl-") for name in sent)
    assert found["/v1/metrics"][0] == metrics


async def test_copies_go_over_grpc_too(own_stack: Stack, receiver: OtlpReceiver) -> None:
    await start_forwarding(own_stack, f"grpc://{receiver.grpc_address}", "x-key=v")
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=200))
    await asyncio.to_thread(receiver.wait_until, lambda spans: len(spans) == 200)
    assert receiver.metadata["x-key"] == "v"


@pytest.mark.full
async def test_an_endpoint_that_is_down_delays_no_ack_and_gets_its_copies_later(own_stack: Stack) -> None:
    port = free_port()
    await start_forwarding(own_stack, f"http://127.0.0.1:{port}")
    for number in range(20):  # each request waits for its ack
        await post_spans(own_stack, span_request([(f"ro-{number}", "at-1")], spans=2), ack="stored")
    assert await forwarded(own_stack) == {}
    receiver = OtlpReceiver(http_port=port)
    try:
        await asyncio.to_thread(receiver.wait_until, lambda spans: len(spans) == 40)
    finally:
        await asyncio.to_thread(receiver.close)


@pytest.mark.full
async def test_an_unresponsive_endpoint_delays_neither_acks_nor_shutdown(own_stack: Stack, receiver: OtlpReceiver) -> None:
    receiver.go.clear()
    await start_forwarding(own_stack, receiver.http_url)
    for number in range(20):
        await post_spans(own_stack, span_request([(f"ro-{number}", "at-1")], spans=2), ack="stored")
    assert await own_stack.end("collector") == 0
    assert "20 requests that were not forwarded" in own_stack.log.read_text()


async def test_copies_that_the_endpoint_refuses_are_counted_and_dropped(own_stack: Stack, receiver: OtlpReceiver) -> None:
    receiver.status = 401
    await start_forwarding(own_stack, receiver.http_url, "authorization=secret")
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=2))
    await until(lambda: forwarded(own_stack), lambda now: now == {"dropped_refused": 1})
    text = own_stack.log.read_text()
    assert "answers 401" in text
    assert "secret" not in text


async def test_the_queue_of_copies_is_bounded(receiver: OtlpReceiver) -> None:
    receiver.go.clear()
    forwarder = Forwarder(make_target(receiver.http_url, ""), "the test", max_queue_bytes=5000)
    task = asyncio.create_task(forwarder.run())
    bodies = [span_request([("ro-1", "at-1")], spans=10).SerializeToString() for _ in range(40)]
    for body in bodies:
        forwarder.offer("traces", body)
    taken = 5000 // len(bodies[0])
    assert forwarder.counts["dropped_full"] == pytest.approx(40 - taken, abs=1)
    assert forwarder.queued_bytes <= 5000
    receiver.go.set()
    await forwarder.drain(10)
    assert (forwarder.counts["sent"], forwarder.queued_bytes) == (40 - forwarder.counts["dropped_full"], 0)
    assert {body for _, body, _ in receiver.bodies} <= set(bodies)
    task.cancel()
    await forwarder.close()


def test_a_wrong_endpoint_or_header_is_a_wrong_setting() -> None:
    for endpoint in ("ftp://host:1", "host", "http://", "grpc://host"):
        with pytest.raises(SettingsError, match="AGL_FORWARD_OTLP"):
            make_target(endpoint, "")
    with pytest.raises(SettingsError, match="entry 2") as failure:
        parse_headers("a=b,secret", "AGL_FORWARD_HEADERS")
    assert "secret" not in str(failure.value)


async def test_a_collector_does_not_forward_to_itself(tmp_path: Path) -> None:
    stack = new_stack(tmp_path)
    stack.settings = stack.settings.model_copy(update={"forward_otlp": f"http://localhost:{stack.settings.otlp_http_port}"})
    process = stack.spawn("collector")
    assert await asyncio.to_thread(process.wait, 40) == 1
    assert "is this collector itself" in stack.log.read_text()
