"""Real services for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agl_otel.traces.reader import TraceReader
from tests.clickhouse_cluster import two_shards
from tests.clickhouse_server import ClickHouseServer

from .stack import Stack, new_stack, start


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One queue and one collector for all tests of a worker: rollout ids isolate the tests, as they isolate users."""
    with closing(new_stack(tmp_path_factory.mktemp("stack"))) as made:
        asyncio.run(start(made))
        yield made


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of the test's own, not started."""
    made = new_stack(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def reader(stack: Stack) -> AsyncIterator[TraceReader]:
    """A reader of the shared stack."""
    async with stack.reader() as made:
        yield made


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClickHouseServer]]:
    """The servers of a cluster of two shards."""
    with two_shards(tmp_path_factory.mktemp("shards")) as made:
        yield made
