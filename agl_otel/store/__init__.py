"""The one object that user code and algorithms talk to: what is intended (queue) and what was observed (ClickHouse).

    store = await Store.connect("127.0.0.1:4747")
    rollouts = await store.enqueue(tasks)          # what is intended
    await store.wait([r.rollout_id for r in rollouts])
    traces = await store.traces(rollouts)          # what was observed, with a verdict for every attempt

It holds no state of its own and no SQL: queue/client.py speaks to the queue, traces/reader.py to ClickHouse, write.py to the
collector. store.py puts the parts together: rollouts.py, spans.py, steps.py, resources.py over base.py (connections).
"""

from __future__ import annotations

from pathlib import Path

from agl_otel.store.address import CONNECT_TIMEOUT_SECONDS, DESCRIBE_PATH
from agl_otel.store.base import UNSET, LightningStoreCapabilities, LightningStoreStatistics, Unset
from agl_otel.store.names import (
    CollectionBasedLightningStore,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    MongoLightningStore,
)
from agl_otel.store.store import Store

__path__.append(str(Path(__file__).parents[1] / "compat" / "store"))  # modules of 0.3 that are none of ours

__all__ = [
    "CONNECT_TIMEOUT_SECONDS",
    "DESCRIBE_PATH",
    "UNSET",
    "CollectionBasedLightningStore",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "MongoLightningStore",
    "Store",
    "Unset",
]
