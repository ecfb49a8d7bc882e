"""Heartbeats are coalesced, and survive an unavailable queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.errors import UnavailableError
from agl_otel.queue.updates import Observation


class Listener:
    """The queue that heartbeats are sent to."""

    def __init__(self) -> None:
        self.away = False
        self.received: list[Observation] = []
        self.calls = 0
        self.changed = asyncio.Event()

    async def observe(self, observations: Sequence[Observation], *, sent_at: float | None = None) -> None:
        self.calls += 1
        self.changed.set()
        if self.away:
            raise UnavailableError("away")
        self.received += observations


async def test_spans_of_an_attempt_are_summed_between_two_reports() -> None:
    listener = Listener()
    beats = Heartbeats(listener, interval_seconds=1000)
    beats.add("ro-1", "at-1", 2, 10.0)
    beats.add("ro-1", "at-1", 3, 12.0)
    beats.add("ro-1", "at-1", 0, 11.0)
    beats.add("ro-2", "at-2", 0, 13.0)
    await beats.flush()
    assert listener.received == [Observation("ro-1", "at-1", 5, 12.0), Observation("ro-2", "at-2", 0, 13.0)]


async def test_an_attempt_is_reported_at_most_once_in_an_interval() -> None:
    listener = Listener()
    beats = Heartbeats(listener, interval_seconds=1000)
    for number in range(5):
        beats.add("ro-1", "at-1", 1, float(number))
        await beats.flush()
    assert listener.calls == 1
    await beats.flush(everything=True)
    assert [observation.spans for observation in listener.received] == [1, 4]


async def test_reports_that_the_queue_did_not_take_are_kept() -> None:
    listener = Listener()
    listener.away = True
    beats = Heartbeats(listener, interval_seconds=0.001)
    beats.add("ro-1", "at-1", 2, 10.0)
    await beats.flush(everything=True)
    listener.away = False
    beats.add("ro-1", "at-1", 1, 11.0)
    await beats.flush(everything=True)
    assert listener.received == [Observation("ro-1", "at-1", 3, 11.0)]
    assert beats.failures == 1


async def test_the_task_reports_on_its_own() -> None:
    listener = Listener()
    beats = Heartbeats(listener)
    task = asyncio.create_task(beats.run())
    beats.add("ro-1", "at-1", 1, 10.0)
    async with asyncio.timeout(300):
        await listener.changed.wait()
    task.cancel()
    assert [observation.spans for observation in listener.received] == [1]
