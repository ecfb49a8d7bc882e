"""Clients that send what cannot be stored, that are slow, and that break off."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import struct
import time
from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import grpc.aio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.signals import PROTOCOLS
from agl_otel_hook import conventions
from tests.chaos.world import World
from tests.contract.collector.otlp import post_spans, request_of, span

DAY_NANO: Final = 86_400 * 10**9
LARGE_BYTES: Final = 300 << 20
HEADERS: Final = {"Content-Type": "application/x-protobuf"}
HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # preface, empty SETTINGS
SERVE_SECONDS: Final = 20.0  # in which an honest request must be through while slow clients hold on


def at(nano: int) -> Span:
    """A span of a time."""
    made = span()
    made.start_time_unix_nano, made.end_time_unix_nano = nano, nano + 1000
    return made


async def hopeless_requests(world: World) -> None:
    """1970, 2500, 300 MB, 5,000 days at once, and neighbours that are fine: what is refused is said, what is fine is stored."""
    await world.start()
    now = time.time_ns()
    async with world.load("hopeless", pause_seconds=0.05):
        for number in range(world.amount(10, 1)):
            ids = {conventions.ROLLOUT_ID: f"ro-h-{number}", conventions.ATTEMPT_ID: "at-1"}
            wrong = [at(0), at(1000), at(16_725_225_600 * 10**9), at(2**64 - 2000), at(now + 3 * DAY_NANO)]
            answer = await post_spans(world.stack, request_of([span(), *wrong, span()], ids), ack="stored")
            world.expect(answer.partial_success.rejected_spans == 5, f"of five wrong times were refused: {answer.partial_success}")
            days = [at(now - day * DAY_NANO) for day in range(5000)]
            await post_spans(world.stack, request_of(days, ids), ack="stored")
            body = request_of([span("large", {"text": "x" * LARGE_BYTES})], ids).SerializeToString()
            await _refused_http(world, body, "identity", 413)
            await _refused_http(world, gzip.compress(body, 1), "gzip", 413)
            await _refused_grpc(world, body)
            del body
            async with world.stack.reader() as reader:
                (row,) = await reader.query(
                    "SELECT count() AS n, uniqExact(SpanId) AS ids, uniqExact(toDate(Timestamp)) AS days, "
                    "uniqExact(toDate(ReceivedAt)) AS received "
                    "FROM otel_traces WHERE RolloutId = {r:String} AND AttemptId = 'at-1'",
                    params={"r": ids[conventions.ROLLOUT_ID]},
                )
            stored = (row["n"], row["ids"], row["days"])
            world.expect(stored == (5002, 5002, 5000) and row["received"] <= 2, f"of 5002 spans over 5000 days are stored: {row}")


async def _refused_http(world: World, body: bytes, encoding: str, status: int) -> None:
    async with aiohttp.ClientSession() as session:
        headers = {**HEADERS, "Content-Encoding": encoding}
        try:
            async with session.post(f"{world.stack.http}/v1/traces", data=body, headers=headers) as response:
                world.expect(response.status == status, f"{len(body)} bytes ({encoding}) were answered {response.status}, not {status}")
        except (aiohttp.ClientConnectionError, OSError):
            pass  # refused before it was sent to its end


async def _refused_grpc(world: World, body: bytes) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(world.stack.grpc, options=options) as channel:
        try:
            await channel.unary_unary(PROTOCOLS[0].method, request_serializer=None, response_deserializer=None)(body)
        except grpc.aio.AioRpcError as error:
            world.expect(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(body)} bytes were answered {error.code()}")
        else:
            world.expect(False, f"{len(body)} bytes were taken")


async def large_attributes(world: World) -> None:
    """300 MB in one attribute where the operator allows it: stored whole, and exactly once after a kill."""
    await world.start()
    ids = {conventions.ROLLOUT_ID: "ro-large", conventions.ATTEMPT_ID: "at-1"}
    body = request_of([span("large", {"text": "x" * LARGE_BYTES})], ids).SerializeToString()
    async with world.load("large", pause_seconds=0.05):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{world.stack.http}/v1/traces", data=body, headers=HEADERS) as response,
        ):
            world.expect(response.status == 200, f"300 MB that are allowed were answered {response.status}: {await response.text()}")
        del body
        await world.kill()
        await world.stack.start_collector()
    async with world.stack.reader() as reader:
        await reader.barrier()
        rows = await reader.query("SELECT length(SpanAttributes['text']) AS n FROM otel_traces WHERE RolloutId = 'ro-large'")
    world.expect([int(row["n"]) for row in rows] == [LARGE_BYTES], f"of 300 MB are stored: {rows}")


@contextlib.asynccontextmanager
async def connected(address: str, first: bytes) -> AsyncGenerator[asyncio.StreamWriter]:
    """A connection that has sent `first`."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(first)
        await writer.drain()
        yield writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def head(length: str, *more: str) -> bytes:
    """The head of an OTLP request over HTTP."""
    lines = ("POST /v1/traces HTTP/1.1", "Host: localhost", "Content-Type: application/x-protobuf", f"Content-Length: {length}", *more)
    return "\r\n".join((*lines, "", "")).encode()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_head(path: str) -> bytes:
    """HEADERS of a gRPC call, without Huffman or the table. Lone surrogates of `path` are bytes that are no UTF-8."""

    def field(name: str, value: str) -> bytes:
        data = value.encode(errors="surrogateescape")
        return bytes((0, len(name))) + name.encode() + bytes((len(data),)) + data

    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "collector",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return frame(1, 4, 1, b"".join(field(*pair) for pair in fields.items()))


def slow_starts(world: World) -> list[tuple[str, bytes]]:
    """(address, how a slow client begins and then stops)."""
    http = urlsplit(world.stack.http).netloc
    large = 60 << 20
    return [
        (http, b"POST /v1/tra"),
        (http, head("1000")[:-2]),
        (http, head(str(large)) + bytes(1000)),
        (http, head("5000", "Content-Encoding: gzip") + gzip.compress(bytes(4000))[:10]),
        (http, head("1000").replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"40000000\r\n" + bytes(1000)),
        (world.stack.grpc, HTTP2[:20]),
        (world.stack.grpc, HTTP2 + grpc_head(PROTOCOLS[0].method)),
        (world.stack.grpc, HTTP2 + grpc_head(PROTOCOLS[0].method) + frame(0, 0, 1, struct.pack(">BI", 0, large) + bytes(5000))),
    ]


async def slow_clients(world: World) -> None:
    """Hundreds of connections that begin a request and then send next to nothing: nobody else may notice."""
    await world.start()
    async with world.load("slow", pause_seconds=0.02), contextlib.AsyncExitStack() as held:
        writers: list[asyncio.StreamWriter] = []
        for number in range(world.amount(400, 64)):
            starts = slow_starts(world)
            writers.append(await held.enter_async_context(connected(*starts[number % len(starts)])))
        for _ in range(world.amount(30, 3)):
            await asyncio.wait_for(world.still_serves(), SERVE_SECONDS)
            for writer in writers:
                if not writer.is_closing():
                    writer.write(b"\0")
            await asyncio.sleep(0.5 if world.full else 0.05)
        await world.more_acked(100)
    world.expect(not world.answers.keys() - {""}, f"honest clients were turned away: {dict(world.answers)}")


async def broken_clients(world: World) -> None:
    """Connections that end in the middle, lengths and encodings that lie, and whole requests whose sender does not wait for the answer."""
    await world.start()
    http = urlsplit(world.stack.http).netloc
    async with world.load("broken", pause_seconds=0.02):
        for number in range(world.amount(300, 16)):
            for address, first in slow_starts(world):
                async with connected(address, first) as writer:
                    if number % 2:
                        writer.transport.abort()
            body = request_of(
                [span()], {conventions.ROLLOUT_ID: "ro-gone", conventions.ATTEMPT_ID: os.urandom(4).hex()}
            ).SerializeToString()
            packed = gzip.compress(body)
            for content in (
                head(str(len(body))) + body,  # whole; nobody reads the answer
                head(str(len(body) - 5)) + body,
                head(str(len(packed)), "Content-Encoding: gzip") + packed[:-6] + b"xxxxxx",
                head(str(len(body)), "Content-Encoding: zstd") + body,
                head("-1") + body,
                head("9" * 30) + body,
                head(str(len(body) - 3)) + body[:-3],
            ):
                async with connected(http, content) as writer:
                    if number % 3 == 0:
                        writer.transport.abort()
            if number % 50 == 0:
                await world.still_serves()
    await world.still_serves()
    async with world.stack.reader() as reader:
        rows = await reader.query("SELECT count() AS n, uniqExact(SpanId) AS ids FROM otel_traces WHERE RolloutId = 'ro-gone'")
    world.expect(rows[0]["n"] == rows[0]["ids"], f"spans of clients that went are stored twice: {rows}")
