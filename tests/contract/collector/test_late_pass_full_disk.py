"""A pass whose copies fill the disk: the next pass writes the missing ones once, and the sums over them are complete again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agl_otel.maintain.maintainer import Maintainer
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.clickhouse_server import ServerEngine
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer
from tests.contract.collector.test_late_pass import LateStore, span
from tests.local_queue import LocalQueue, ManualClock
from tests.small_disk import fill, on_small_disk

pytestmark = pytest.mark.full
LATE = 20
MIB = 1 << 20
SMALL = ("max_block_size", "min_insert_block_size_rows", "min_insert_block_size_bytes", "max_insert_threads")
"""Set to 1, these make a statement write each copy separately, as it does with copies of 256 MiB or more."""


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[LocalQueue]:
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}") as running:
        yield running


@pytest.mark.parametrize("leave", [3 * MIB, 6 * MIB, 12 * MIB])
async def test_copies_that_a_full_disk_cuts_off_are_completed_once(leave: int, queue: LocalQueue, tmp_path: Path) -> None:
    server = ClickHouseServer(tmp_path / "server")
    data = tmp_path / "server" / "data"
    server.before, server.profile = on_small_disk(data, "256m"), dict.fromkeys(SMALL, "1")
    with server:
        engine = ServerEngine(ServerAddress.parse(server.url()))
        create_schema(engine, where="the test")
        late_store = LateStore(engine, queue, ManualClock(), adopt=False)
        maintainer = Maintainer(queue.client, late_store.maintenance.run, clock=late_store.clock)
        await late_store.store([span(1, 0, "ro-1", "at-1")])
        await maintainer.once()
        await late_store.store([span(n, 1, attributes={"large": os.urandom(MIB // 2).hex()}) for n in range(2, LATE + 2)])
        ballast = fill(server.pid, data, leave=leave)
        with pytest.raises(ClickHouseError, match=r"not enough space|No space left"):
            await maintainer.once()
        ballast.unlink()
        cut_off = len(late_store.copies())
        assert cut_off < LATE
        report = await maintainer.once()
        assert report is not None and report["spans"] == LATE - cut_off
        assert [row["spanId"] for row in late_store.copies()] == [f"{n:016x}" for n in range(2, LATE + 2)]
        assert engine.select("SELECT RolloutId, Spans FROM otel.rollout_summary") == [["ro-1", LATE + 1]]
        await late_store.maintenance.close()
        engine.close()
