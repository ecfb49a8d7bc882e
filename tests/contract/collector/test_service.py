"""The collector starts, fails to start, works without its neighbours, and stops."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time

import aiohttp
import pytest

from agl_otel.net.auth import scoped_token
from agl_otel.queue.client import QueueClient
from agl_otel.stack.supervisor import STOP_GRACE_SECONDS
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.schema import create_schema
from agl_otel.types import EnqueueRolloutRequest
from agl_otel_hook import conventions

from .otlp import post_on, post_spans, request_of, span, span_request
from .stack import Stack, until


async def start_and_fail(stack: Stack) -> str:
    """Return the line on stderr of a collector that cannot start."""
    process = stack.spawn("collector")
    assert await asyncio.to_thread(process.wait, 40) == 1
    del stack.processes["collector"]
    lines = [line for line in stack.log.read_text().splitlines() if line.startswith("agl-otel collector:")]
    assert len(lines) == 1
    assert "Traceback" not in stack.log.read_text()
    return lines[0]


@pytest.mark.parametrize("name", ["otlp_grpc_port", "otlp_http_port", "clickhouse_port"])
async def test_a_port_in_use_is_named_with_its_setting(name: str, own_stack: Stack) -> None:
    port: int = getattr(own_stack.settings, name)
    with socket.create_server(("127.0.0.1", port)):
        message = await start_and_fail(own_stack)
    assert f":{port}" in message
    assert f"AGL_{name.upper()}" in message


async def test_a_data_directory_that_another_collector_holds_is_refused(own_stack: Stack) -> None:
    engine = await asyncio.to_thread(ChdbEngine, own_stack.settings.data_dir / "traces")
    try:
        assert "open in another process" in await start_and_fail(own_stack)
    finally:
        engine.close()


async def test_a_data_directory_that_cannot_be_written_is_a_wrong_setting(own_stack: Stack) -> None:
    own_stack.settings.data_dir.write_text("a file")
    message = await start_and_fail(own_stack)
    assert str(own_stack.settings.data_dir) in message
    assert "AGL_DATA_DIR" in message


async def test_data_of_another_version_are_refused(own_stack: Stack) -> None:
    def write_the_future() -> None:
        engine = ChdbEngine(own_stack.settings.data_dir / "traces")
        create_schema(engine, where="the test")
        engine.insert("otel.agl_migrations", ["Version", "Name"], [b'{"Version":999,"Name":"future"}\n'])
        engine.close()

    await asyncio.to_thread(write_the_future)
    message = await start_and_fail(own_stack)
    assert "have schema 999, and this release of agl-otel has schema 1" in message
    assert "use the release that wrote them" in message


async def test_sigterm_drains_and_leaves_an_empty_log(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=20))
    assert await own_stack.end("collector") == 0
    assert sum(path.stat().st_size for path in own_stack.settings.wal_dir.glob("*.wal")) == 0
    await own_stack.start_collector()
    async with own_stack.reader() as reader:
        assert len(await reader.spans(["ro-1"])) == 20


@pytest.mark.full
@pytest.mark.parametrize("length", [1 << 20, 1 << 10], ids=["large", "small"])  # small ones are aiohttp's when they come slowly
async def test_sigterm_does_not_wait_for_the_rest_of_a_body(length: int, own_stack: Stack) -> None:
    await own_stack.start_collector()
    reader, writer = await asyncio.open_connection("127.0.0.1", own_stack.settings.otlp_http_port)
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode() + bytes(100))

    async def in_flight() -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{own_stack.http}/status") as answer:
            [point] = (await answer.json())["metrics"]["agl.collector.in_flight_bytes"]
            return point["value"]

    await until(in_flight, lambda held: held == 100)
    began = time.monotonic()
    assert await own_stack.end("collector") == 0
    assert time.monotonic() - began < STOP_GRACE_SECONDS, "the supervisor would have killed it"
    assert await reader.read() == b""
    writer.close()


async def test_it_registers_at_start_and_deregisters_at_stop(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    async with QueueClient(own_stack.queue) as queue:
        found = await until(queue.describe, lambda found: bool(found.collectors))
        assert (found.collector_grpc, found.collector_http, found.clickhouse) == (own_stack.grpc, own_stack.http, own_stack.sql)
        assert found.collectors == [own_stack.http]
        await own_stack.end("collector")
        assert (await queue.describe()).collectors == []


async def test_without_the_queue_spans_are_acked_and_numbered_when_it_is_back(own_stack: Stack) -> None:
    await own_stack.start_collector()
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=3))
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=2))
    await own_stack.start_queue()
    async with own_stack.reader() as reader, asyncio.timeout(300):
        await reader.barrier()
        assert [span.sequence_id for span in await reader.spans(["ro-1"])] == [1, 2, 3, 4, 5]


async def test_spans_are_a_heartbeat_and_make_an_attempt_running(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    async with QueueClient(own_stack.queue) as queue:
        (claimed,) = await queue.start([EnqueueRolloutRequest(input=1)])
        ids = {conventions.ROLLOUT_ID: claimed.rollout_id, conventions.ATTEMPT_ID: claimed.attempt.attempt_id}

        async def attempt() -> tuple[str, float | None]:
            (found,) = await queue.query_attempts([claimed.rollout_id])
            return found.status, found.last_heartbeat_time

        before = (await attempt())[1]
        await post_spans(own_stack, request_of([span(conventions.SPAN_ATTEMPT), span(conventions.SPAN_SEAL)], ids))
        assert (await until(attempt, lambda now: now[1] != before))[0] == "preparing"
        await post_spans(own_stack, request_of([span()], ids))
        await until(attempt, lambda now: now[0] == "running")


async def test_a_token_is_required_on_every_port(own_stack: Stack) -> None:
    own_stack.settings.token = type(own_stack.settings.token)("secret")
    await own_stack.start_queue()
    await own_stack.start_collector()
    request = span_request([("ro-1", "at-1")], spans=1)
    async with aiohttp.ClientSession() as session:
        for url in (f"{own_stack.http}/v1/traces", f"{own_stack.http}/barrier", f"{own_stack.sql}/?query=SELECT+1"):
            async with session.post(url, data=request.SerializeToString(), headers={"Content-Type": "application/x-protobuf"}) as response:
                assert response.status == 401
                assert "AGL_TOKEN" in await response.text()
        await post_on(session, own_stack, request, ack="stored", Authorization="Bearer secret")
        for page, scope, until, status, says in (
            (f"{own_stack.http}/metrics", "metrics", 3600, 200, "agl_collector"),
            (f"{own_stack.http}/status", "metrics", 3600, 401, "not for collector"),
            (f"{own_stack.http}/status", "collector", -1, 401, "expired at"),
            (f"{own_stack.sql}/?query=SELECT+42", "clickhouse", 3600, 200, "42"),
            (f"{own_stack.sql}/?query=SELECT+42", "web", 3600, 401, "not for clickhouse"),
        ):
            token = scoped_token("secret", [scope], time.time() + until)
            async with session.get(page, headers={"Authorization": f"Bearer {token}"}) as response:
                assert response.status == status and says in await response.text(), page
    async with own_stack.reader() as reader:
        await reader.barrier()
        assert len(await reader.spans(["ro-1"])) == 1


async def test_a_request_above_the_limit_is_refused_even_if_it_is_small_when_compressed(own_stack: Stack) -> None:
    await own_stack.start_collector()
    body = gzip.compress(bytes(65 << 20), 1)
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession() as session, session.post(f"{own_stack.http}/v1/traces", data=body, headers=headers) as response:
        assert response.status == 413
        assert b"64 MiB" in await response.read()
    assert await own_stack.end("collector") == 0
