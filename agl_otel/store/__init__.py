"""The interface of user code and algorithms to both stores: what is intended (queue) and what was observed (ClickHouse).

    store = await Store.connect("127.0.0.1:4747")
    rollouts = await store.enqueue(tasks)          # what is intended
    await store.wait([r.rollout_id for r in rollouts])
    traces = await store.traces(rollouts)          # what was observed, with a verdict for every attempt

It holds no state and no SQL: it calls the queue by queue/client.py, ClickHouse by traces/reader.py, and the collector by write.py.
store.py combines the parts: rollouts.py, spans.py, steps.py, figures.py and resources.py over connections.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_otel.store.address import CONNECT_TIMEOUT_SECONDS, DESCRIBE_PATH

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
    from agl_otel.store.store import Store

__path__.append(str(Path(__file__).parents[1] / "compat" / "names" / "store"))  # modules of 0.3 that do not exist here

__all__ = ["CONNECT_TIMEOUT_SECONDS", "DESCRIBE_PATH", "Store"]


def __getattr__(name: str) -> Any:
    """Load the Store, which commands on the queue do without, and 0.3's names, which belong to a room above this one."""
    if name == "Store":
        from agl_otel.store.store import Store

        return Store
    if not name.startswith("_"):
        from agl_otel.compat import stores

        if name in stores.__all__:
            return getattr(stores, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
