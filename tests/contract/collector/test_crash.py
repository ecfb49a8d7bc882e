"""kill -9 at every point between the socket and ClickHouse: every acked span is readable exactly once after the restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from agl_otel.collector import faults

from .otlp import post_on, post_spans, span_request
from .stack import Stack, new_stack

pytestmark = pytest.mark.full
CLIENTS = 6

# The collector's own main, killed with kill -9 when it reaches `point` for the nth time.
KILLED_AT = """
import itertools, os, signal, sys
from agl_otel.collector import faults
from agl_otel.collector.__main__ import main
passed = itertools.count(1)
faults.hooks[{point!r}] = lambda: next(passed) == {nth} and os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One queue for all stacks whose collectors are killed; it keeps running, as in production."""
    made = new_stack(tmp_path_factory.mktemp("queue"))
    try:
        asyncio.run(made.start_queue())
        yield made
    finally:
        made.close()


@pytest.fixture
def killed_stack(own_stack: Stack, queue: Stack) -> Stack:
    """A stack of the test's own, with that queue."""
    own_stack.settings = own_stack.settings.model_copy(update={"queue_port": queue.settings.queue_port})
    return own_stack


async def sent_before(stack: Stack) -> set[str]:
    """Send two spans and return their ids; they are acked before the crash."""
    await post_spans(stack, first := span_request([("ro-first", "at-0")], spans=2))
    return {s.span_id.hex() for r in first.resource_spans for g in r.scope_spans for s in g.spans}


async def send_until_it_dies(stack: Stack, acked: set[str], client: int) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(10_000):
            request = span_request([(f"ro-{client}", f"at-{number % 3}"), (f"ro-{client}-{number}", "at-0")], spans=3)
            try:
                await post_on(session, stack, request)
            except (aiohttp.ClientError, ConnectionError):
                return
            acked.update(s.span_id.hex() for r in request.resource_spans for g in r.scope_spans for s in g.spans)


async def check_acked_spans_are_stored_once(stack: Stack, acked: set[str]) -> None:
    async with stack.reader() as reader:
        await reader.barrier()
        rows = await reader.query("SELECT SpanId, RolloutId, SequenceId, BatchId, BatchPos FROM otel_traces")
    times = Counter(row["SpanId"] for row in rows)
    assert acked
    assert not acked - times.keys(), "acked spans were lost"
    assert max(times.values()) == 1, "spans are stored twice"
    numbers = Counter((row["RolloutId"], row["SequenceId"]) for row in rows)
    assert max(numbers.values()) == 1, "a sequence number was given twice"
    assert all(row["SequenceId"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("point", "nth"),
    [pytest.param(*each, marks=pytest.mark.smoke if each == ("logged", 1) else ()) for each in itertools.product(faults.POINTS, (1, 4))],
)
async def test_acked_spans_survive_kill_9(point: str, nth: int, killed_stack: Stack) -> None:
    await killed_stack.start_collector("-c", KILLED_AT.format(point=point, nth=nth + 2))
    acked = await sent_before(killed_stack)
    await asyncio.gather(*(send_until_it_dies(killed_stack, acked, client) for client in range(CLIENTS)))
    assert await asyncio.to_thread(killed_stack.processes["collector"].wait, 30) == -signal.SIGKILL
    await killed_stack.start_collector()
    await check_acked_spans_are_stored_once(killed_stack, acked)


async def purge_until_it_dies(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            while True:
                async with session.post(f"{stack.http}/purge") as response:
                    assert response.status == 200


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", faults.ROTATION_POINTS)
async def test_acked_spans_survive_kill_9_while_the_log_is_purged(point: str, nth: int, killed_stack: Stack) -> None:
    first = point == "segment-opened"  # it is reached once more, at the start
    await killed_stack.start_collector("-c", KILLED_AT.format(point=point, nth=nth + first))
    acked = await sent_before(killed_stack)
    sending = [send_until_it_dies(killed_stack, acked, client) for client in range(CLIENTS)]
    await asyncio.gather(*sending, purge_until_it_dies(killed_stack))
    assert await asyncio.to_thread(killed_stack.processes["collector"].wait, 30) == -signal.SIGKILL
    await killed_stack.start_collector()
    await check_acked_spans_are_stored_once(killed_stack, acked)


async def test_a_second_crash_during_recovery_loses_nothing(killed_stack: Stack) -> None:
    acked: set[str] = set()
    await killed_stack.start_collector("-c", KILLED_AT.format(point="inserted", nth=3))
    await asyncio.gather(*(send_until_it_dies(killed_stack, acked, client) for client in range(CLIENTS)))
    killed_stack.processes["collector"].wait(300)
    for point in ("inserted", "batch-noted"):
        process = killed_stack.spawn("collector", "-c", KILLED_AT.format(point=point, nth=1))
        assert await asyncio.to_thread(process.wait, 30) in (-signal.SIGKILL, 0)
    await killed_stack.start_collector()
    await check_acked_spans_are_stored_once(killed_stack, acked)


async def test_a_replayed_span_keeps_its_time_of_receipt(own_stack: Stack) -> None:
    await own_stack.start_collector()  # no queue: nothing can be numbered, so everything stays in the log
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=1))
    await own_stack.end("collector", signal.SIGKILL)
    crashed = time.time()
    await own_stack.start_queue()
    await own_stack.start_collector()
    async with own_stack.reader() as reader:
        await reader.barrier()
        (row,) = await reader.query("SELECT toUnixTimestamp64Milli(toDateTime64(ReceivedAt, 3)) AS received, SequenceId FROM otel_traces")
    assert row["received"] / 1000 <= crashed
    assert row["SequenceId"] == 1


def tear(directory: Path) -> None:
    (segment,) = directory.glob("*.wal")
    with segment.open("ab") as file:
        file.write(b"\x50\x00\x00\x00torn")


async def test_a_torn_last_record_is_kept_in_a_file_and_reported(own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=2), ack="stored")
    await own_stack.end("collector", signal.SIGKILL)
    tear(own_stack.settings.wal_dir)
    await own_stack.start_collector()
    async with aiohttp.ClientSession() as session, session.get(f"{own_stack.http}/health") as response:
        assert (await response.json())["log_torn_bytes"] == 8
    log = own_stack.log.read_text()
    assert "torn or damaged; it is unknown whether it was acknowledged" in log and "8 bytes are kept in" in log
    await post_spans(own_stack, span_request([("ro-1", "at-1")], spans=1), ack="stored")
    async with own_stack.reader() as reader:
        assert [span.sequence_id for span in await reader.spans(["ro-1"])] == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_resend_after_a_restart_is_stored_once(number: int, own_stack: Stack) -> None:
    await own_stack.start_queue()
    await own_stack.start_collector()
    request = span_request([("ro-1", "at-1")], spans=2)
    for ack in ("stored", "durable", "stored"):
        await post_spans(own_stack, request, ack=ack)
        await own_stack.end("collector", number)
        await own_stack.start_collector()
    async with own_stack.reader() as reader:
        await reader.barrier()
        assert await reader.query("SELECT count() AS n FROM otel_traces") == [{"n": 2}]
