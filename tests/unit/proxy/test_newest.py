from __future__ import annotations

import asyncio

from agl_otel.errors import UnavailableError
from agl_otel.proxy.newest import REFRESH_SECONDS, Newest
from agl_otel.types import ResourcesUpdate


class Versions:
    """A queue with one set of resources."""

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 1
        self.looked_up = 0
        self.away = False
        self.go = asyncio.Event()
        self.go.set()

    def clock(self) -> float:
        return self.now

    async def look_up(self, resources_id: str) -> ResourcesUpdate | None:
        self.looked_up += 1
        await self.go.wait()
        if self.away:
            raise UnavailableError("the queue is away")
        made = ResourcesUpdate(resources_id=resources_id, create_time=0, update_time=0, version=max(1, self.version), resources={})
        return made if self.version else None


async def version(newest: Newest) -> int | None:
    found = await newest.get()
    return found.version if found is not None else None


async def test_it_is_looked_up_once_a_second_by_all_calls_together() -> None:
    queue = Versions()
    newest = Newest(queue.look_up, "production", clock=queue.clock)
    assert await asyncio.gather(*(version(newest) for _ in range(100))) == [1] * 100
    queue.version = 2
    queue.now = REFRESH_SECONDS - 0.01
    assert await version(newest) == 1 and queue.looked_up == 1
    queue.now = REFRESH_SECONDS
    assert await asyncio.gather(*(version(newest) for _ in range(100))) == [2] * 100 and queue.looked_up == 2
    queue.now += REFRESH_SECONDS
    before = await newest.get()
    queue.now += REFRESH_SECONDS
    assert await newest.get() is before and queue.looked_up == 4


async def test_an_absent_set_is_remembered_for_a_second_too() -> None:
    queue = Versions()
    queue.version = 0
    newest = Newest(queue.look_up, "production", clock=queue.clock)
    assert [await version(newest) for _ in range(3)] == [None] * 3 and queue.looked_up == 1
    queue.version, queue.now = 5, REFRESH_SECONDS
    assert await version(newest) == 5


async def test_the_last_version_serves_while_the_queue_is_away_or_silent() -> None:
    queue = Versions()
    newest = Newest(queue.look_up, "production", clock=queue.clock)
    assert await version(newest) == 1
    queue.away = True
    for _ in range(3):
        queue.now += REFRESH_SECONDS
        assert await version(newest) == 1
    queue.go.clear()
    queue.now += REFRESH_SECONDS
    silent = asyncio.create_task(version(newest))
    assert await silent == 1 and queue.looked_up == 5
    queue.now += 10 * REFRESH_SECONDS
    assert await version(newest) == 1 and queue.looked_up == 5, "the look-up goes on"
    queue.away, queue.version = False, 2
    queue.go.set()
    while await version(newest) != 2:  # noqa: ASYNC110  # the look-up tells nobody
        await asyncio.sleep(0)


async def test_a_queue_that_never_answered_is_told_from_an_absent_set() -> None:
    queue = Versions()
    queue.away = True
    newest = Newest(queue.look_up, "production", clock=queue.clock)
    assert await version(newest) is None and not newest.answered
    queue.away, queue.now = False, REFRESH_SECONDS
    assert await version(newest) == 1 and newest.answered
