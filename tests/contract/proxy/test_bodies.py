"""The bytes of requests are counted from the first byte to the answer; beyond the limit the proxy answers with a retryable error."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
import zlib
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import aiohttp

from agl_otel.proxy.app import MAX_BODY_BYTES
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

CALL = f"{SCOPE}/v1/chat/completions"
HELD_BYTES = 1 << 20
SMALL = {"model": "m", "messages": HELLO}


@contextlib.asynccontextmanager
async def narrow(receiver: OtlpReceiver, model: ModelServer) -> AsyncGenerator[Stand]:
    """A proxy with room for a megabyte of bodies."""
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), limits=Limits(held_bytes=HELD_BYTES)) as stand:
        yield stand


@contextlib.asynccontextmanager
async def stalled(stand: Stand, path: str) -> AsyncGenerator[None]:
    """A client that announces 60 MB, sends more than there is room for, and then stalls."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(stand.url).port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n".encode() + b" " * (HELD_BYTES + 1))
    await writer.drain()
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()


async def test_slow_bodies_are_counted_and_further_ones_refused_as_retryable(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with narrow(receiver, model) as stand:
        for path in (CALL, f"{SCOPE}/v1/messages/count_tokens", "/close", "/delete"):
            async with stalled(stand, path):
                answer = await stand.post(CALL, SMALL)
                for _ in range(200):  # until it has come
                    if answer[0] != 200:
                        break
                    answer = await stand.post(CALL, SMALL)
                status, said, headers = answer
                assert (status, headers["Retry-After"]) == (503, "1") and "AGL_PROXY_MAX_IN_FLIGHT_BYTES" in said["error"]["message"]
            while (await stand.post(CALL, SMALL))[0] == 503:  # until the proxy knows that it has gone
                pass


async def test_a_body_is_counted_until_its_answer(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with narrow(receiver, model) as stand:
        await stand.post("/pause", {"mode": "hold", "wait_seconds": 0})
        waiting = asyncio.create_task(stand.post(CALL, {**SMALL, "pad": "x" * HELD_BYTES}))
        await stand.until(lambda health: health["held"] == 1)
        assert (await stand.post(CALL, SMALL))[0] == 503
        async with aiohttp.ClientSession() as session, session.post(f"{stand.url}/resume") as resumed:  # alone it has no body
            assert resumed.status == 200
        assert (await waiting)[0] == 200
        assert (await stand.post(CALL, SMALL))[0] == 200


async def test_the_decompressed_size_of_a_body_is_counted(receiver: OtlpReceiver, model: ModelServer) -> None:
    packed = zlib.compress(b" " * HELD_BYTES + b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}')
    headers = {"content-encoding": "deflate"}
    async with narrow(receiver, model) as stand, aiohttp.ClientSession() as session:
        async with session.post(stand.url + CALL, data=packed, headers=headers) as alone:
            assert alone.status == 200, await alone.text()
        await stand.post("/pause", {"mode": "hold", "wait_seconds": 0})
        waiting = asyncio.create_task(stand.post(CALL, SMALL))
        await stand.until(lambda health: health["held"] == 1)
        async with session.post(stand.url + CALL, data=packed, headers=headers) as beside:
            assert beside.status == 503
        assert (await stand.post("/resume"))[0] == 200
        assert (await waiting)[0] == 200


async def test_a_body_that_decompresses_beyond_the_limit_is_refused_early(stand: Stand) -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()
    tracemalloc.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(stand.url + CALL, data=bomb, headers={"content-encoding": "deflate"}) as answer,
        ):
            assert answer.status == 413 and "64 MiB" in (await answer.json())["error"]["message"]
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BODY_BYTES
    finally:
        tracemalloc.stop()


async def test_a_body_of_50_mib_is_served_and_one_beyond_64_is_refused(stand: Stand, model: ModelServer) -> None:
    model.prompt_tokens = [5]
    text = "x" * (50 << 20)
    status, _, _ = await stand.post(CALL, {"model": "m", "messages": [{"role": "user", "content": text}, *HELLO]})
    assert status == 200 and len(model.requests[0]["messages"][0]["content"]) == len(text)
    assert (await stand.post(CALL, {**SMALL, "pad": "x" * (65 << 20)}))[0] == 413
