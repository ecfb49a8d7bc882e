"""Rollouts older than retention_days are deleted from the queue, and deleted data is removed from the files in time."""

from __future__ import annotations

import pytest

from agl_otel.errors import UnavailableError
from agl_otel.maintain.maintainer import PRUNE_SECONDS, PURGE_AGAIN_SECONDS, PURGE_SECONDS, Maintainer, Report
from agl_otel.queue.client import RolloutUpdate
from agl_otel.types import EnqueueRolloutRequest
from tests.local_queue import LocalQueue

DAY = 86400.0


async def no_work(since: float) -> Report:
    return {"spans": 0, "logs": 0, "ambiguous": 0, "adopted": 0, "began": since}


async def finished(queue: LocalQueue, *names: str) -> None:
    for name in names:
        await queue.client.enqueue([EnqueueRolloutRequest(input=1, rollout_id=name)])
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=name, status="failed")])


async def left(queue: LocalQueue) -> list[str]:
    return [rollout.rollout_id for rollout in await queue.client.query_rollouts()]


async def test_finished_rollouts_leave_the_queue_after_retention_days_and_open_ones_stay(queue: LocalQueue) -> None:
    maintainer = Maintainer(queue.client, no_work, retention_days=30, clock=queue.clock)
    await queue.client.enqueue([EnqueueRolloutRequest(input=1, rollout_id="ro-open")])
    await finished(queue, "ro-1", "ro-2")
    queue.clock.advance(29 * DAY)
    await finished(queue, "ro-3")
    report = await maintainer.once()
    assert report is not None
    assert report["pruned"] == 0
    queue.clock.advance(1.5 * DAY)
    report = await maintainer.once()
    assert report is not None
    assert (report["pruned"], await left(queue)) == (2, ["ro-open", "ro-3"])
    assert (await queue.client.statistics())["rollouts_by_status"] == {"queuing": 1, "failed": 1}


async def test_the_queue_is_asked_for_old_rollouts_once_an_hour(queue: LocalQueue) -> None:
    maintainer = Maintainer(queue.client, no_work, retention_days=1, clock=queue.clock)
    await finished(queue, "ro-1")
    queue.clock.advance(DAY - 60)
    await maintainer.once()
    queue.clock.advance(120)
    await maintainer.once()
    assert await left(queue) == ["ro-1"]
    queue.clock.advance(PRUNE_SECONDS)
    await maintainer.once()
    assert await left(queue) == []


async def test_without_retention_days_everything_stays(queue: LocalQueue) -> None:
    await finished(queue, "ro-1")
    queue.clock.advance(10_000 * DAY)
    assert await Maintainer(queue.client, no_work, clock=queue.clock).once() is not None
    assert await left(queue) == ["ro-1"]


async def test_files_are_purged_every_few_hours_and_earlier_after_a_failure(queue: LocalQueue) -> None:
    at: list[float] = []

    async def purge() -> None:
        at.append(queue.clock())
        if len(at) == 2:
            raise UnavailableError("somebody reads the log")

    maintainer = Maintainer(queue.client, no_work, purge=purge, clock=queue.clock)
    await maintainer.once()
    for seconds, times in ((PURGE_SECONDS - 1, 1), (1, 2), (PURGE_AGAIN_SECONDS - 1, 2), (1, 3), (PURGE_SECONDS - 1, 3), (1, 4)):
        queue.clock.advance(seconds)
        if len(at) == 1 and times == 2:
            with pytest.raises(UnavailableError):
                await maintainer.once()
        else:
            await maintainer.once()
        assert len(at) == times
    assert PURGE_SECONDS + 3 * PURGE_AGAIN_SECONDS < DAY, "in time, also where it fails now and then"
