"""Bodies at the OTLP port: slow ones are given up; compressed ones are unpacked in separate threads, until the client disconnects."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import pytest

from agl_otel.collector.http_port import PROTOBUF, HttpPort
from agl_otel.collector.receive import Receiver
from agl_otel.errors import UnavailableError
from agl_otel.net import bodies
from agl_otel.net.auth import ingest_key, scoped_token
from agl_otel.net.http_server import listen, make_runner
from agl_otel.net.in_flight import Hold, InFlight
from tests.unit.net.test_http_server import SHORT_SECONDS, connection, until_closed

PATIENCE_SECONDS = 60.0
BODY = gzip.compress(b"hello", mtime=0)


async def test_unpacking_ends_when_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(_: str, __: bytes, ___: int, *, hold: Hold, disconnected: Callable[[], bool]) -> bytes:
        began.set()
        while not disconnected():
            threading.Event().wait(0.01)
        ended.set()
        raise UnavailableError("the client went away")

    monkeypatch.setattr(bodies, "decompress", endless)
    receiver = Receiver(cast("Any", None), cast("Any", None), max_message_bytes=1 << 20)
    in_flight = InFlight(1 << 20)
    runner = make_runner(HttpPort(receiver, in_flight, dict).app())
    await runner.setup()
    try:
        port = await listen(runner, "127.0.0.1", 0, None)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\nContent-Encoding: gzip\r\n"
        writer.write(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        assert await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        assert in_flight.bytes == len(BODY)
        writer.close()
        assert await asyncio.to_thread(ended.wait, PATIENCE_SECONDS)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while in_flight.bytes:  # noqa: ASYNC110 - the handler has not ended yet
                await asyncio.sleep(0)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["stalled", "a byte now and then"])
async def test_a_stalled_body_is_given_up_and_its_memory_released(drip: bytes) -> None:
    receiver = Receiver(cast("Any", None), cast("Any", None), max_message_bytes=1 << 30)
    in_flight = InFlight(1 << 30)
    app = HttpPort(receiver, in_flight, dict, body_seconds=SHORT_SECONDS).app()
    runner = make_runner(app, lingering_time=SHORT_SECONDS)
    await runner.setup()
    try:
        async with connection(await listen(runner, "127.0.0.1", 0, None)) as (reader, writer):
            request = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {1 << 30}\r\n\r\n"
            writer.write(request.encode() + b"begin")
            answer = await until_closed(reader, writer, drip)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"Retry-After" in head
        assert b"the body did not come within" in body and b"send less at once" in body
        assert in_flight.bytes == 0
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("shown", "status"), [
    (ingest_key("secret"), 404), (scoped_token("secret", ["metrics"], 4e9), 404), ("secret", 404),
    (ingest_key("secret")[:-1], 401), (scoped_token("secret", ["metrics"], 1.0), 401), (ingest_key("other"), 401),
])  # fmt: skip
async def test_a_path_that_does_not_exist_is_a_404_for_every_valid_token_only(shown: str, status: int) -> None:
    receiver = Receiver(cast("Any", None), cast("Any", None), "secret")
    runner = make_runner(HttpPort(receiver, InFlight(1 << 20), dict).app())
    await runner.setup()
    try:
        port = await listen(runner, "127.0.0.1", 0, None)
        url = f"http://127.0.0.1:{port}/v1/traces/v1/traces"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {shown}"}) as session, session.post(url) as answer:
            text = await answer.text()
        assert answer.status == status
        assert ("set OTEL_EXPORTER_OTLP_ENDPOINT without /v1/traces" in text) == (status == 404)
        assert receiver.refusals.counts == {("unknown_path" if status == 404 else "unauthorized", "http"): 1}
    finally:
        await runner.cleanup()
