"""The object that user code and algorithms talk to: what is intended (queue) and what was observed (ClickHouse).

    store = await Store.connect("127.0.0.1:4747")
    rollouts = await store.enqueue(tasks)          # what is intended
    await store.wait([r.rollout_id for r in rollouts])
    traces = await store.traces(rollouts)          # what was observed, with a verdict for every attempt

It holds no state of its own and no SQL: queue/client.py speaks to the queue, traces/reader.py to ClickHouse, write.py to the
collector. store.py puts the parts together: rollouts.py, spans.py, steps.py, figures.py and resources.py over connections.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_otel.store.address import CONNECT_TIMEOUT_SECONDS, DESCRIBE_PATH
from agl_otel.store.store import Store

if TYPE_CHECKING:
    from agl_otel.compat.stores import UNSET as UNSET
    from agl_otel.compat.stores import CollectionBasedLightningStore as CollectionBasedLightningStore
    from agl_otel.compat.stores import InMemoryLightningStore as InMemoryLightningStore
    from agl_otel.compat.stores import LightningStore as LightningStore
    from agl_otel.compat.stores import LightningStoreCapabilities as LightningStoreCapabilities
    from agl_otel.compat.stores import LightningStoreClient as LightningStoreClient
    from agl_otel.compat.stores import LightningStoreServer as LightningStoreServer
    from agl_otel.compat.stores import LightningStoreStatistics as LightningStoreStatistics
    from agl_otel.compat.stores import LightningStoreThreaded as LightningStoreThreaded
    from agl_otel.compat.stores import MongoLightningStore as MongoLightningStore

__path__.append(str(Path(__file__).parents[1] / "compat" / "names" / "store"))  # modules of 0.3 that are none of ours

__all__ = ["CONNECT_TIMEOUT_SECONDS", "DESCRIBE_PATH", "Store"]


def __getattr__(name: str) -> Any:
    """Load 0.3's names, which stand above this room."""
    if not name.startswith("_"):
        from agl_otel.compat import stores

        if name in stores.__all__:
            return getattr(stores, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
