"""Bodies that expand without end are refused; clients that only compress their requests are served beside them."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib

import aiohttp
import pytest
from google.rpc.status_pb2 import Status

from agl_otel_hook import conventions

from .otlp import request_of, span
from .stack import Stack, until

PATIENCE_SECONDS = 300.0
ATTACK_BYTES = 4 << 20
SLOW_BYTES = 40 << 20
HEADERS = {"Content-Type": "application/x-protobuf"}
EMPTY_BLOCKS = 2 * bytes.fromhex("04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a")
"""Empty deflate blocks, each with its own tables: 90 bits."""


async def post_compressed(session: aiohttp.ClientSession, stack: Stack) -> None:
    """Send a span like an SDK with OTEL_EXPORTER_OTLP_COMPRESSION=gzip; it must be accepted."""
    body = gzip.compress(request_of([span()], {conventions.ROLLOUT_ID: "ro-beside"}).SerializeToString())
    async with session.post(f"{stack.http}/v1/traces", data=body, headers={**HEADERS, "Content-Encoding": "gzip"}) as answer:
        assert answer.status == 200, await answer.read()


def empty_members(encoding: str) -> bytes:
    zstd = pytest.importorskip("backports.zstd", reason="zstd is not installed")
    one = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}[encoding](b"")
    return one * (ATTACK_BYTES // len(one))


async def test_bodies_of_empty_members_are_refused_and_others_are_served(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:

        async def attack(encoding: str, body: bytes) -> tuple[int, str]:
            sent = {**HEADERS, "Content-Encoding": encoding}
            async with session.post(f"{stack.http}/v1/traces", data=io.BytesIO(body), headers=sent) as answer:
                return answer.status, Status.FromString(await answer.read()).message

        bodies = {encoding: empty_members(encoding) for encoding in ("gzip", "deflate", "zstd")}
        async with asyncio.timeout(PATIENCE_SECONDS):
            answers = await asyncio.gather(*(attack(*each) for each in bodies.items() for _ in range(4)))
            assert {(status, "members" in text) for status, text in answers} == {(400, True)}, answers
            await post_compressed(session, stack)


async def test_slow_bodies_delay_no_others_and_end_with_their_clients(stack: Stack) -> None:
    body = b"\x78\x9c" + EMPTY_BLOCKS * (SLOW_BYTES // len(EMPTY_BLOCKS))
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {HEADERS['Content-Type']}\r\nContent-Encoding: deflate\r\n"
    slow = [await asyncio.open_connection("127.0.0.1", stack.settings.otlp_http_port) for _ in range(5)]
    for _, writer in slow:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answers = [asyncio.create_task(reader.readline()) for reader, _ in slow]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(writer.drain() for _, writer in slow))
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_SECONDS):
            for _ in range(5):
                await post_compressed(session, stack)
            assert not all(answer.done() for answer in answers), "they were served meanwhile"
    finally:
        for task in answers:
            task.cancel()
        for _, writer in slow:
            writer.close()

    async def in_flight() -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{stack.http}/status") as answer:
            [point] = (await answer.json())["metrics"]["agl.collector.in_flight_bytes"]
            return point["value"]

    assert await until(in_flight, lambda held: held == 0) == 0
