"""`agl-otel maintain` on a running queue and collector: what it finds, and that only one runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import aiohttp
import pytest

from agl_otel.errors import ConflictError, UnavailableError
from agl_otel.maintain.maintainer import LEASE, Maintainer, Report, maintainer
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel_hook import conventions
from tests.clickhouse_server import ClickHouseServer

from .otlp import post_spans, request_of, span
from .stack import Stack, start, until


async def test_spans_that_came_before_their_attempt_are_read_once(stack: Stack) -> None:
    trace = os.urandom(16)
    ids = {conventions.ROLLOUT_ID: "ro-late", conventions.ATTEMPT_ID: "at-late"}
    root = span(conventions.SPAN_ATTEMPT, ids, trace=trace)
    root.end_time_unix_nano = root.start_time_unix_nano
    child = span("child", trace=trace, parent=root.span_id)
    grandchild = span("grandchild", trace=trace, parent=child.span_id)
    for sent in ([grandchild], [child], [root]):
        await post_spans(stack, request_of(sent), ack="stored")
    async with stack.reader() as reader, maintainer(stack.settings) as made:
        assert [s.name for s in await reader.spans(["ro-late"])] == [conventions.SPAN_ATTEMPT]
        assert len(await reader.by_trace([trace.hex()])) == 3
        report = await made.once()
        assert report is not None
        assert report["spans"] == 2
        spans = await reader.spans(["ro-late"], attempt_id="at-late")
        assert [s.name for s in spans] == [conventions.SPAN_ATTEMPT, "grandchild", "child"], "in the order of arrival"
        assert [s.sequence_id for s in spans] == [1, 2, 3]
        assert {s.rollout_id for s in await reader.by_trace([trace.hex()])} == {"ro-late"}
        assert len(await reader.by_trace([trace.hex()])) == 3
        assert await reader.by_trace([]) == []
        await post_spans(stack, request_of([span("later", trace=trace, parent=child.span_id)]), ack="stored")
        report = await made.once()
        assert report is not None
        assert report["spans"] == 0, "the collector remembers the trace"
        assert len(await reader.spans(["ro-late"])) == 4


@pytest.mark.full
async def test_with_a_server_the_maintainer_writes_itself(own_stack: Stack, tmp_path: Path) -> None:
    with ClickHouseServer(tmp_path / "server") as server:
        own_stack.settings = own_stack.settings.model_copy(update={"clickhouse_url": server.url()})
        await start(own_stack)
        trace = os.urandom(16)
        root = span(conventions.SPAN_ATTEMPT, {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1"}, trace=trace)
        for sent in (span("child", trace=trace, parent=root.span_id), root):
            await post_spans(own_stack, request_of([sent]), ack="stored")
        await own_stack.end("collector")
        async with maintainer(own_stack.settings) as made:
            report = await made.once()
            assert report is not None
            assert report["spans"] == 1
        await own_stack.start_collector()
        async with own_stack.reader() as reader:
            assert [s.name for s in await reader.spans(["ro-1"])] == [conventions.SPAN_ATTEMPT, "child"]


async def test_one_maintainer_works_and_the_other_takes_over(stack: Stack) -> None:
    passes: list[tuple[str, float]] = []

    def counting(name: str) -> Maintainer:
        async def work(since: float) -> Report:
            passes.append((name, since))
            return {"spans": 0, "logs": 0, "ambiguous": 0, "adopted": 0, "began": 1000.0 + len(passes)}

        return Maintainer(queue, work, lease_seconds=30)

    async with QueueClient(stack.queue) as queue:
        first, second = counting("first"), counting("second")
        assert await first.once() is not None
        assert await second.once() is None
        assert await first.once() is not None
        await first.release()
        assert await second.once() is not None
        assert await first.once() is None
        await second.release()
    assert passes == [("first", 0.0), ("first", 1001.0), ("second", 0.0)], "who takes the lease anew begins with everything"


async def test_a_pass_ends_when_its_lease_is_lost(stack: Stack) -> None:
    ended = asyncio.Event()

    async def work(_: float) -> Report:
        with contextlib.suppress(asyncio.CancelledError):
            await queue.lease(LEASE, "mine", 0)
            assert await queue.lease(LEASE, "theirs", 30)
            await asyncio.Event().wait()
        ended.set()
        raise asyncio.CancelledError

    async with QueueClient(stack.queue) as queue:
        with pytest.raises(ConflictError, match="another maintainer"):
            await Maintainer(queue, work, holder="mine", lease_seconds=0.3).once()
        assert ended.is_set()
        await queue.lease(LEASE, "theirs", 0)


async def test_unidentified_spans_are_dropped_under_the_drop_policy(own_stack: Stack) -> None:
    own_stack.settings = Settings.load(**{**own_stack.settings.model_dump(), "unidentified": "drop"})
    await start(own_stack)
    parent = span("known", {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1"})
    mixed = [span("nobody"), parent, span("child", trace=parent.trace_id, parent=parent.span_id)]
    for sent in ([span("nobody")], mixed, [span("broken", {conventions.ROLLOUT_ID: "a b"}), span("nobody")]):
        answer = await post_spans(own_stack, request_of(sent), ack="stored")
        assert answer.partial_success.rejected_spans == sum(s.name == "broken" for s in sent), "a dropped span is no fault of the client"
    async with own_stack.reader() as reader, aiohttp.ClientSession() as session:
        assert {row["SpanName"] for row in await reader.query("SELECT SpanName FROM otel_traces")} == {"known", "child"}
        health = await (await session.get(f"{own_stack.http}/health")).json()
        assert (health["unidentified"], health["dropped"], health["traces"]) == (3, 3, 2)


async def test_without_a_collector_the_command_reports_it(own_stack: Stack) -> None:
    await own_stack.start_queue()
    async with maintainer(own_stack.settings) as made:
        with pytest.raises(UnavailableError, match="no collector has registered"):
            await made.once()


async def test_the_service_sends_the_token_and_releases_the_lease(own_stack: Stack) -> None:
    own_stack.settings = Settings.load(**{**own_stack.settings.model_dump(), "token": "secret"})
    await start(own_stack)
    async with aiohttp.ClientSession() as session:
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            async with session.post(f"{own_stack.http}/maintain", json={"since": 0}, headers=headers) as answer:
                assert answer.status == status
        async with session.post(f"{own_stack.http}/maintain", data=b"?", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 400
    own_stack.spawn("maintain")

    async def lease_is_held() -> bool:
        return not await queue.lease(LEASE, "the test", 0.001)

    async with QueueClient(own_stack.queue, token="secret") as queue:
        await until(lease_is_held, bool)
        assert await own_stack.end("maintain") == 0
        assert await queue.lease(LEASE, "the test", 1), "it gave the lease back"
