"""A collector with a full disk reports it at once, keeps what it has acked, and continues when there is room."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agl_otel.cli.once import warn_of_degraded_collectors
from agl_otel.collector.grpc_port import METHODS
from agl_otel.errors import UnavailableError
from agl_otel.store import Store
from tests.small_disk import fill, on_small_disk

from .otlp import post_spans, span_request
from .stack import Stack, until

pytestmark = pytest.mark.full


async def over_http(stack: Stack, body: bytes) -> tuple[int, str, Status]:
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Type": "application/x-protobuf"}
        async with session.post(f"{stack.http}/v1/traces", data=body, headers=headers) as response:
            return response.status, response.headers.get("Retry-After", ""), Status.FromString(await response.read())


async def over_grpc(stack: Stack, body: bytes) -> tuple[grpc.StatusCode, Status]:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        try:
            await channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)(body, timeout=60)
        except grpc.aio.AioRpcError as error:
            trailing: Any = error.trailing_metadata()
            return error.code(), Status.FromString(dict(trailing)["grpc-status-details-bin"])
    raise AssertionError("it was taken")


async def page(stack: Stack, path: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.http}{path}") as response:
        assert response.status == 200
        return await response.json()


@pytest.mark.parametrize("reserve", [0, 4 << 20])
async def test_a_full_disk_of_the_log_is_reported_to_clients_and_in_health(
    own_stack: Stack, reserve: int, caplog: pytest.LogCaptureFixture
) -> None:
    wal = own_stack.settings.wal_dir
    own_stack.settings = own_stack.settings.model_copy(update={"disk_reserve_bytes": reserve})
    own_stack.before = on_small_disk(wal, "24m")
    await own_stack.start_queue()
    await own_stack.start_collector()
    await post_spans(own_stack, span_request([("ro-before", "at-1")], spans=30))
    async with own_stack.reader() as reader:
        await reader.barrier()  # no request waits and would be tried again
    ballast = await asyncio.to_thread(fill, own_stack.processes["collector"].pid, wal)
    body = span_request([("ro-during", "at-1")], spans=30).SerializeToString()
    await until(lambda: over_http(own_stack, body), lambda answer: answer[0] != 200)  # free space is checked once a second
    code, retry, http_status = await over_http(own_stack, body)
    assert (code, retry) == (503, "1")
    grpc_code, grpc_status = await over_grpc(own_stack, body)
    assert grpc_code is grpc.StatusCode.UNAVAILABLE
    for status in (http_status, grpc_status):
        assert str(wal) in status.message and "make room" in status.message
        assert status.details[0].Unpack(RetryInfo())
    health, status_page = await page(own_stack, "/health"), await page(own_stack, "/status")
    assert health["status"] == "degraded" and str(wal) in health["reason"] and "make room" in health["reason"]
    assert status_page["disk"]["level"] == "full" and "make room" in status_page["disk"]["message"]
    async with await Store.connect(own_stack.queue) as store:
        await warn_of_degraded_collectors(store, own_stack.settings)
    assert f"the collector at {own_stack.http} is degraded" in caplog.text and "make room" in caplog.text
    ballast.unlink()
    await until(lambda: page(own_stack, "/health"), lambda health: health["status"] == "ok")  # no request is needed
    assert (await over_http(own_stack, body))[0] == 200
    async with own_stack.reader() as reader:
        await reader.barrier()
        stored = await reader.spans(["ro-before", "ro-during"])
    assert sorted(span.rollout_id for span in stored) == ["ro-before"] * 30 + ["ro-during"] * 30


async def test_nothing_acked_is_lost_when_clickhouse_and_the_log_are_on_the_full_disk(own_stack: Stack) -> None:
    data = own_stack.settings.data_dir
    own_stack.settings = own_stack.settings.model_copy(update={"disk_reserve_bytes": 0})
    own_stack.before = on_small_disk(data, "160m")
    await own_stack.start_queue()
    await own_stack.start_collector()
    pid = own_stack.processes["collector"].pid
    acked: list[str] = []

    async def send(name: str) -> int:
        code, _, _ = await over_http(own_stack, span_request([(name, "at-1")], spans=20).SerializeToString())
        acked.extend([name] * (code == 200))
        return code

    for number in range(20):
        await send(f"ro-before-{number}")
    ballast = await asyncio.to_thread(fill, pid, data, leave=200_000)  # the log has room, ClickHouse has none
    for number in range(20):
        await send(f"ro-log-{number}")
    reason = (await until(lambda: page(own_stack, "/health"), lambda health: health["status"] == "degraded"))["reason"]
    assert "disk" in reason and "make room" in reason
    async with own_stack.reader() as reader:
        with pytest.raises(UnavailableError, match="make room"):  # at once: nobody knows until when the disk is full
            await reader.barrier()
    ballast.unlink()
    ballast = await asyncio.to_thread(fill, pid, data)
    refused = [code for number in range(200) if (code := await send(f"ro-none-{number}")) != 200]
    assert set(refused) == {503}
    ballast.unlink()
    await until(lambda: page(own_stack, "/health"), lambda health: health["status"] == "ok")  # no request is needed
    assert await send("ro-after") == 200
    async with own_stack.reader() as reader:
        await reader.barrier()
        stored = Counter(span.rollout_id for span in await reader.spans(acked))
    assert stored == dict.fromkeys(acked, 20)


async def test_a_damaged_part_that_clickhouse_moved_away_is_reported(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=30))
    async with own_stack.reader() as reader:
        await reader.barrier()
        answer = await reader.sql("SELECT path, name FROM system.parts WHERE table = 'otel_traces' AND active", limit=2)
    ((folder, part),) = answer["data"]
    await own_stack.end("collector")
    (Path(folder) / "data.bin").write_bytes(b"")
    await own_stack.start_collector()
    health = await until(lambda: page(own_stack, "/health"), lambda health: health["status"] == "degraded")
    (problem,) = (await page(own_stack, "/status"))["store_problems"]
    assert problem in health["reason"]
    assert all(words in problem for words in ("otel_traces", part, "30 rows", "detached"))
