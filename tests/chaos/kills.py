"""kill -9 of the collector, wherever it may be."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice

from agl_otel.collector import faults
from tests.chaos.world import World

SPANS_A_KILL = 4500  # of load between two kills


async def at_random(world: World) -> None:
    """Anywhere, in the middle of its start too."""
    await world.start()
    async with world.load("random"):
        for number in range(world.amount(36, 2)):
            await world.more_acked(world.chance.randrange(2 * SPANS_A_KILL) if world.full else 500)
            await world.kill()
            if number % 6 == 5:  # not even ready
                world.stack.spawn("collector")
                await asyncio.sleep(world.chance.uniform(0.2, 3.0))
                await world.kill()
            await world.stack.start_collector()


async def at_points(world: World) -> None:
    """At every named point, the first time and later ones, so that recovery is killed as well."""
    await world.start()
    await world.kill()
    async with world.load("points"):
        points = cycle(faults.POINTS + (faults.ROTATION_POINTS if world.full else ()))
        chosen = list(islice(points, world.amount(63, len(faults.POINTS))))
        for point in chosen:
            await world.killed_at(point, world.chance.choice((1, 1, 2, 3, 8, 25)) if world.full else 2)
        await world.stack.start_collector()
        await world.more_acked(world.amount(SPANS_A_KILL, 100))
    never = set(chosen) & set(faults.POINTS) - world.reached
    world.expect(not never, f"fault points that were never reached: {sorted(never)}")


async def with_resends(world: World) -> None:
    """Senders that send the same bytes again when they got no answer, as SDKs do: once stored is stored once."""
    await world.start()
    async with world.load("resends", resend=True):
        for _ in range(world.amount(12, 2)):
            await world.more_acked(world.chance.randrange(SPANS_A_KILL) if world.full else 300)
            await world.kill()
            await world.stack.start_collector()
