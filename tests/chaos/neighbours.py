"""The queue, the disk and the clock: what the collector leans on beside ClickHouse."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.chaos.world import World

# The collector's own main with a clock that is wrong by what a file says (seconds).
WRONG_CLOCK = """
import pathlib, sys, time
shift = pathlib.Path({path!r})
right, right_nano = time.time, time.time_ns
time.time = lambda: right() + float(shift.read_text())
time.time_ns = lambda: right_nano() + int(float(shift.read_text()) * 1e9)
from agl_otel.collector.__main__ import main
sys.exit(main())
"""
JUMPS = (0.0, 3600.0, -7200.0, 20 * 86_400.0, 0.0, -80_000.0, 0.5, -0.5)
"""Seconds; not so far back that fresh spans look more than a day ahead."""
DISK_BYTES = 48 << 20


async def queue_away(world: World) -> None:
    """A minute without the queue, then several short ones: numbers are given once, when it is back."""
    await world.start()
    async with world.load("queue", pause_seconds=0.02):
        for number in range(world.amount(8, 2)):
            await world.more_acked(300)
            await world.kill("queue")
            before = world.acked
            await asyncio.sleep((60.0 if not number else world.chance.uniform(0, 3.0)) if world.full else 2.0)
            world.expect(number > 0 or world.acked > before, "nothing was acked without the queue")
            if number % 3 == 1:
                await world.kill()
                await world.stack.start_collector()
            await world.stack.start_queue()


async def files_too_large(world: World) -> None:
    """Every write of the collector ends in the middle (a limit on file sizes), again and again.

    Not with ClickHouse inside it: chdb then keeps parts whose files are empty, and no query works until the next start detaches them.
    """
    await world.start()
    async with world.load("files", pause_seconds=0.01):
        for _ in range(world.amount(12, 2)):
            await world.more_acked(500)
            pid = world.stack.processes["collector"].pid
            limit = world.chance.choice((0, 1, 4096, world.chance.randrange(1 << 20)))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            await asyncio.sleep(world.chance.uniform(0.3, 3.0))
            if world.chance.random() < 0.3:
                await world.kill()
                await world.stack.start_collector()
            else:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                await world.stack.wait_healthy(world.stack.processes["collector"])
            await world.more_acked(100)


async def disk_full(world: World) -> None:
    """The log's disk is full to the last byte, and has room again. Needs root, for a small disk of its own."""
    wal = world.stack.settings.wal_dir
    wal.mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("a small disk of its own needs root")
    if trouble := await asyncio.to_thread(_run, "mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(wal)):
        pytest.skip(f"no small disk can be mounted here: {trouble}")
    try:
        await world.start()
        async with world.load("disk", pause_seconds=0.01):
            for _ in range(world.amount(6, 1)):
                await world.more_acked(500)
                filler = wal / "filler"
                _fill(filler)
                await asyncio.sleep(world.chance.uniform(0.5, 2.0))
                if world.chance.random() < 0.5:
                    await world.kill()
                    _fill(filler)
                    world.stack.spawn("collector")
                    await asyncio.sleep(world.chance.uniform(0.0, 4.0))
                filler.unlink()
                if world.stack.processes["collector"].poll() is not None:  # it could not start without any disk, and said so
                    del world.stack.processes["collector"]
                    await world.stack.start_collector()
                await world.stack.wait_healthy(world.stack.processes["collector"])
                await world.more_acked(100)
        async with world.stack.reader() as reader:
            await reader.barrier()  # the log goes with its disk
        await world.kill()
    finally:
        world.expect(not await asyncio.to_thread(_run, "umount", "-l", str(wal)), "the small disk cannot be unmounted")
    await world.stack.start_collector()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


async def clock_jumps(world: World) -> None:
    """The collector's clock jumps back and forth, also while it is away."""
    shift = world.directory / "shift"
    shift.write_text("0")
    await world.stack.start_queue()
    command = ("-c", WRONG_CLOCK.format(path=str(shift)))
    await world.stack.start_collector(*command)
    async with world.load("clock", pause_seconds=0.01):
        for number in range(world.amount(24, 4)):
            await world.more_acked(300)
            if number % 3 == 2:
                await world.kill()
            _write(shift, world.chance.choice(JUMPS) if world.full else JUMPS[1 + number])
            if number % 3 == 2:
                await world.stack.start_collector(*command)
    _write(shift, 0.0)


def _write(path: Path, seconds: float) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.replace(path)
