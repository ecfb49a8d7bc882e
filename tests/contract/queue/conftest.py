"""One suite for every engine: a test with the fixture `queue` runs on each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.local_queue import LocalQueue
from tests.postgres_server import NoPostgresError, Postgres, running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for all tests of a run."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is missing: pip install 'agl-otel[postgres]'")
    try:
        yield from running()
    except NoPostgresError as error:
        pytest.skip(str(error))


@pytest.fixture(
    params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)]
)  # a further engine is a further name here and a branch below
def queue_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'queue.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_schema()


@pytest.fixture
async def queue(queue_url: str) -> AsyncIterator[LocalQueue]:
    async with LocalQueue(queue_url) as running:
        yield running
