"""One embedded stack for a module's tests: what a user of 0.3 gets from `InMemoryLightningStore()`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from agl_otel.store import InMemoryLightningStore, LightningStore
from agl_otel.types import AttemptedRollout


@pytest.fixture(scope="package")
def store() -> Iterator[LightningStore]:
    """The same store in every test; each test has its own event loop."""
    made = InMemoryLightningStore()
    yield made
    asyncio.run(made.close())


@pytest.fixture
async def begun(store: LightningStore) -> AttemptedRollout:
    """A rollout with an attempt of no worker."""
    return await store.start_rollout({"question": 1})
