"""The table of scenarios, and how one is played: its faults, then what must be true after any of them."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos import clickhouse, clients, fuzz, kills, neighbours
from tests.chaos.check import Tally
from tests.chaos.world import World, new_world

SMALL_SEGMENTS: Final = {"wal_budget_bytes": 16 << 20}  # and segments of an eighth: they change and go while the load runs


@dataclass(frozen=True)
class Scenario:
    """One way to be unlucky."""

    play: Callable[[World], Awaitable[None]]
    on_server: bool = False
    """ClickHouse as a server; else embedded in the collector."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Result:
    """What came of it."""

    name: str
    kills: int
    tally: Tally
    peak_bytes: int
    seconds: float
    problems: list[str]
    skipped: str = ""

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not self.problems and not self.tally.violations


SCENARIOS: Final = {
    "killed-at-random": Scenario(kills.at_random, settings=SMALL_SEGMENTS),
    "killed-at-points": Scenario(kills.at_points, settings=SMALL_SEGMENTS),
    "killed-on-a-server": Scenario(kills.at_random, on_server=True),
    "points-on-a-server": Scenario(kills.at_points, on_server=True, settings=SMALL_SEGMENTS),
    "resent-after-a-kill": Scenario(kills.with_resends, on_server=True),
    "clickhouse-killed": Scenario(clickhouse.killed, on_server=True),
    "clickhouse-hangs": Scenario(clickhouse.stopped, on_server=True),
    "killed-while-it-hangs": Scenario(clickhouse.killed_while_it_hangs, on_server=True),
    "out-of-memory": Scenario(clickhouse.out_of_memory, on_server=True),
    "too-many-parts": Scenario(clickhouse.too_many_parts, on_server=True),
    "vanished-part": Scenario(clickhouse.vanished_part, on_server=True),
    "queue-away": Scenario(neighbours.queue_away),
    "files-too-large": Scenario(neighbours.files_too_large, on_server=True),
    "disk-full": Scenario(neighbours.disk_full, on_server=True, settings={"disk_reserve_bytes": 0}),
    "clock-jumps": Scenario(neighbours.clock_jumps),
    "hopeless-requests": Scenario(clients.hopeless_requests),
    "large-attributes": Scenario(clients.large_attributes, settings={"max_message_bytes": 400 << 20}),
    "slow-clients": Scenario(clients.slow_clients),
    "broken-clients": Scenario(clients.broken_clients),
    "fuzzed": Scenario(fuzz.fuzzed),
}


async def play(name: str, directory: Path, *, seed: int, full: bool, share: float = 1.0) -> Result:
    """Play a scenario in `directory`; what goes wrong is in the result."""
    scenario = SCENARIOS[name]
    began = time.monotonic()
    tally, skipped = Tally(), ""
    try:
        world = new_world(directory, seed=seed, full=full, share=share, on_server=scenario.on_server, **scenario.settings)
    except pytest.skip.Exception as reason:
        return Result(name, 0, tally, 0, 0.0, [], str(reason))
    try:
        await scenario.play(world)
        tally = await world.tally()
        await world.still_serves()
    except pytest.skip.Exception as reason:
        skipped = str(reason)
    except Exception:  # noqa: BLE001 - the boundary: one scenario must not stop the others
        world.note_server()
        world.problems.append(traceback.format_exc())
    finally:
        await asyncio.to_thread(world.close)
    return Result(name, world.kills, tally, world.peak_bytes, time.monotonic() - began, world.problems, skipped)
