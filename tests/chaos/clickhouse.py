"""A ClickHouse server that goes, hangs, refuses or forgets."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Awaitable, Generator
from pathlib import Path

from agl_otel.queue.client import QueueClient
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.types import EnqueueRolloutRequest, RolloutConfig
from tests.chaos.world import World
from tests.clickhouse_server import ClickHouseServer

SMALL = (1, 3)  # so few spans are built here; more are built by ClickHouse
TRACES = "otel.otel_traces"


def server_of(world: World) -> ClickHouseServer:
    """The server of a scenario that has one."""
    assert world.server is not None
    return world.server


@contextlib.contextmanager
def owner(world: World) -> Generator[ServerEngine]:
    """Somebody who may do anything on the server."""
    engine = ServerEngine(ServerAddress.parse(server_of(world).url()))
    try:
        yield engine
    finally:
        engine.close()


async def killed(world: World) -> None:
    """kill -9 of the server, again and again."""
    server = server_of(world)
    await world.start()
    async with world.load("server"):
        for _ in range(world.amount(12, 1)):
            await world.more_acked(world.chance.randrange(6000) if world.full else 300)
            server.kill()
            world.kills += 1
            await world.until(world.degraded, "the collector notices that ClickHouse is away")
            server.start()
            await world.until(lambda: _not(world.degraded()), "ClickHouse is written to again")


async def _not(answer: Awaitable[bool]) -> bool:
    return not await answer


async def stopped(world: World) -> None:
    """The server hangs for two minutes, then is slow for one. The attempt that sends all the while is nobody else's business."""
    server = server_of(world)
    hang, silence, slow = (120.0, 15.0, 60.0) if world.full else (8.0, 5.0, 3.0)
    await world.start()
    async with QueueClient(world.stack.queue) as queue:
        config = RolloutConfig(unresponsive_seconds=silence, max_attempts=3, retry_condition=["unresponsive", "timeout", "failed"])
        (claimed,) = await queue.start([EnqueueRolloutRequest(input=1, config=config)])
        mine = (claimed.rollout_id, claimed.attempt.attempt_id)
        async with world.load("stopped", rollout=mine, senders=4, pause_seconds=0.2), world.load("beside", senders=2, pause_seconds=0.2):
            await world.more_acked(500)
            server.signal(signal.SIGSTOP)
            before = world.acked
            await asyncio.sleep(hang)
            world.expect(world.acked > before, "nothing was acked while ClickHouse hung")
            for _ in range(int(slow)):
                server.signal(signal.SIGCONT)
                await asyncio.sleep(0.1)
                server.signal(signal.SIGSTOP)
                await asyncio.sleep(0.9)
            server.signal(signal.SIGCONT)
            attempts = await queue.query_attempts([mine[0]])
            found = [(attempt.attempt_id, attempt.status) for attempt in attempts]
            world.expect(found == [(mine[1], "running")], f"the attempts of a rollout that never fell silent: {found}")


async def killed_while_it_hangs(world: World) -> None:
    """The collector is killed with an insert under way in a server that hangs: that insert still happens, after recovery has asked."""
    server = server_of(world)
    await world.start()
    async with world.load("hangs", senders=4, pause_seconds=0.02):
        for _ in range(world.amount(15, 2)):
            await world.more_acked(world.chance.randrange(2000) if world.full else 200)
            await asyncio.sleep(world.chance.uniform(0, 0.5))
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(world.chance.uniform(0.3, 1.0))
            await world.kill()
            world.stack.spawn("collector")
            await asyncio.sleep(world.chance.uniform(2.0, 6.0))
            server.signal(signal.SIGCONT)
            await world.stack.wait_healthy(world.stack.processes["collector"])


async def out_of_memory(world: World) -> None:
    """The user that we write as may hold next to nothing, then enough."""
    server = server_of(world)
    await world.start()
    async with world.load("memory", pause_seconds=0.01):
        for _ in range(world.amount(4, 1)):
            await world.more_acked(500)
            server.kill()
            server.profile = {"max_memory_usage": str(world.chance.choice((300_000, 1_000_000)))}
            server.start()
            await world.until(lambda: _reason(world, "memory limit"), "an insert fails for want of memory")
            await world.more_acked(500)
            server.kill()
            server.profile = {}
            server.start()
            await world.until(lambda: _not(world.degraded()), "ClickHouse is written to again")


async def _reason(world: World, text: str) -> bool:
    return text in str((await world.health()).get("reason", "")).lower()


async def too_many_parts(world: World) -> None:
    """Nothing is merged, and every insert is refused; then merges go on."""
    await world.start()
    async with world.load("parts", pause_seconds=0.01):
        for _ in range(world.amount(4, 1)):
            await world.more_acked(500)
            with owner(world) as engine:
                engine.command(f"SYSTEM STOP MERGES {TRACES}")
                engine.command(f"ALTER TABLE {TRACES} MODIFY SETTING parts_to_delay_insert = 1, parts_to_throw_insert = 2")
                await world.until(lambda: _reason(world, "too many parts"), "an insert is refused")
                await world.more_acked(500)
                engine.command(f"ALTER TABLE {TRACES} RESET SETTING parts_to_delay_insert, parts_to_throw_insert")
                engine.command(f"SYSTEM START MERGES {TRACES}")
            await world.until(lambda: _not(world.degraded()), "ClickHouse is written to again")


async def vanished_part(world: World) -> None:
    """The collector dies after an insert, and the part is gone with the server's power, but not from its deduplication log."""
    server = server_of(world)
    await world.start()
    await world.kill()
    recovered = 0
    async with world.load("vanished", senders=2, sizes=SMALL, pause_seconds=0.05):
        for number in range(world.amount(6, 1)):
            await world.killed_at("inserted", 4 + number)
            with owner(world) as engine:
                parts = engine.select(
                    f"SELECT DISTINCT path FROM system.parts WHERE active AND database = 'otel' AND table = 'otel_traces' AND level = 0 "
                    f"AND name IN (SELECT _part FROM {TRACES} WHERE BatchId = (SELECT max(BatchId) FROM {TRACES}))"
                )
            server.kill()
            world.expect(bool(parts), "the part of the last batch was merged before it could vanish")
            for (path,) in parts:
                shutil.rmtree(Path(str(path)))
            server.start()
            await world.stack.start_collector()
            await world.more_acked(50)
            async with world.stack.reader() as reader:
                await reader.barrier()
            recovered += int((await world.health()).get("store_recovered", 0))
            await world.kill()
        await world.stack.start_collector()
    world.expect(recovered > 0, "nothing was recovered: no part that mattered has vanished")
